"""Several hosts on one machine: network namespaces with addresses of their own, joined by a bridge in one more."""

import contextlib
import os
import secrets
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.waiting import HANG_SECONDS

INTERFACE = "lan0"
"""The interface of every host in the network that the hosts trust."""
SIDE = "side0"
"""The interface of every host in another network."""
RANDOM_NUMBER, KEEP, DROP = 2**32 - 4096 + 56, 2**32 - 1, 2
"""Numbers of a classic BPF program: where Linux keeps a random number of 32 bits, and what a filter of tc returns."""
LAN, SIDE_LAN = "10.77.41", "10.77.42"


class Network:
    """Hosts by name, each a network namespace; `close` removes them and all that they held."""

    def __init__(self, hosts: Sequence[str]) -> None:
        mark = f"tc{secrets.token_hex(3)}"
        self._hub = f"{mark}-hub"
        self._names = {host: f"{mark}-{host}" for host in hosts}
        self.addresses = {host: f"{LAN}.{number}" for number, host in enumerate(hosts, start=1)}
        self._made: list[str] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            self._build()
            undo.pop_all()

    def _build(self) -> None:
        for name in (self._hub, *self._names.values()):
            _ip("netns", "add", name)
            self._made.append(name)
        for bridge in ("br0", "br1"):
            _ip("-n", self._hub, "link", "add", bridge, "type", "bridge")
            _ip("-n", self._hub, "link", "set", bridge, "up")
        for number, (host, name) in enumerate(self._names.items(), start=1):
            _ip("-n", name, "link", "set", "lo", "up")
            for interface, lan, bridge in ((INTERFACE, LAN, "br0"), (SIDE, SIDE_LAN, "br1")):
                far = self._far_end(host, interface)
                _ip("link", "add", interface, "netns", name, "type", "veth", "peer", "name", far, "netns", self._hub)
                _ip("-n", name, "addr", "add", f"{lan}.{number}/24", "dev", interface)
                _ip("-n", name, "link", "set", interface, "up")
                _ip("-n", self._hub, "link", "set", far, "master", bridge, "up")

    def _far_end(self, host: str, interface: str) -> str:
        return f"v{list(self._names).index(host)}{interface}"

    def cut(self, host: str) -> None:
        """Pull the host's cable: nothing goes in or out, and nobody is notified."""
        _ip("-n", self._hub, "link", "set", self._far_end(host, INTERFACE), "nomaster")

    def repair(self, host: str) -> None:
        _ip("-n", self._hub, "link", "set", self._far_end(host, INTERFACE), "master", "br0")

    def slow_down(self, host: str, rate: str) -> None:
        """Let the host's cable carry no more than `rate`, such as 4mbit, in both directions; `tc` is of iproute2."""
        self._tc(host, "qdisc", "replace", "root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms")

    def lose(self, host: str, part: float) -> None:
        """Let the host's cable lose this part of all frames, in both directions: by a filter, because not every kernel
        has netem."""
        self._tc(host, "qdisc", "add", "clsact")
        program = f"4,32 0 0 {RANDOM_NUMBER},53 0 1 {int(part * 2**32)},6 0 0 {KEEP},6 0 0 {DROP}"
        self._tc(host, "filter", "add", "egress", "bpf", "direct-action", "bytecode", program)

    def _tc(self, host: str, what: str, verb: str, *words: str) -> None:
        """At both ends of the host's cable."""
        for where, interface in ((self._hub, self._far_end(host, INTERFACE)), (self._names[host], INTERFACE)):
            done = subprocess.run(
                ["ip", "netns", "exec", where, "tc", what, verb, "dev", interface, *words],
                capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr

    def on(self, host: str, *command: str) -> list[str]:
        """The command line that runs `command` on a host; the process is the command itself, not a wrapper."""
        return ["ip", "netns", "exec", self._names[host], *command]

    def run(
        self, host: str, *command: str, seconds: float = HANG_SECONDS, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        line = self.on(host, *command)
        return subprocess.run(
            line, capture_output=True, text=True, timeout=seconds, env={**os.environ, **env}, check=False
        )

    def start(self, host: str, *command: str, stdin: int | None = None, **env: str) -> "subprocess.Popen[str]":
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.on(host, *command), stdin=stdin, env={**os.environ, **env}, **pipes)

    def close(self) -> None:
        """Remove the namespaces, and with them their ends of every cable."""
        for name in self._made:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=HANG_SECONDS, check=False)
        self._made.clear()


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")


def leftovers() -> list[Path]:
    """Namespaces of these tests that are still there."""
    return list(Path("/run/netns").glob("tc*")) if Path("/run/netns").is_dir() else []
