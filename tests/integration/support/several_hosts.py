"""A cluster whose agents are on hosts of their own, paired with keys, and what others on that network can do."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import tomli_w
from tests.conftest import SHARED_PIDS
from tests.integration.support.namespaces import LAN, Network
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.security.keys import KeyFolder

NODES = ("alpha", "beta", "gamma")
DESK, STRANGER = "desk", "stranger"
PORT = 7474
LOOK = """
import sys, msgspec
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.messages import SnapshotRequest
with BlockingClient(sys.argv[1], timeout_seconds=600) as client:
    for _ in sys.stdin:
        print(msgspec.json.encode(client.ask(SnapshotRequest, 0)).decode(), flush=True)
"""
"""A script that tells what an agent says whenever it is given a line."""


class Hosts:
    """Agents on three hosts; a fourth, the desk, has an operator's key, and a fifth has none that anyone knows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = Network([*NODES, DESK, STRANGER])
        self.keys = {host: KeyFolder(folder / host / "keys") for host in (*NODES, DESK, STRANGER)}
        self.file = folder / "cluster.toml"
        self.agents: dict[str, subprocess.Popen[str]] = {}
        self._looker: subprocess.Popen[str] | None = None
        self._pair()

    def address(self, node: str) -> str:
        return f"tcp://{self.network.addresses[node]}:{PORT}"

    def _pair(self) -> None:
        for host, folder in self.keys.items():
            (folder.path.parent).mkdir(parents=True)
            folder.make(host)
        desk = self.keys[DESK].user()
        for node in NODES:
            self.keys[node].authorize(desk.name, desk.public, "operator")
        nodes = {node: {"address": self.address(node), "key": self.keys[node].agent().public} for node in NODES}
        self.file.write_text(tomli_w.dumps({"trusted_networks": [f"{LAN}.0/24"], "nodes": nodes}))

    def env(self, host: str) -> dict[str, str]:
        """Return what makes `host` a machine of its own: its keys and its state."""
        home = self.folder / host
        return {"TRAINCTL_KEYS": str(self.keys[host].path), "TRAINCTL_STATE": str(home / "state"),
                "TRAINCTL_CLUSTER": str(self.file)}  # fmt: skip

    def start(self) -> None:
        """Start the agents and wait until each is bound."""
        for node in NODES:
            self.agents[node] = self.network.start(
                node, sys.executable, "-m", "trainctl.node_agent.cli", "run", "--name", node, **self.env(node)
            )
            SHARED_PIDS.add(self.agents[node].pid)
        for node, process in self.agents.items():
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            assert line, process.stderr.read()
            assert json.loads(line)["listen"] == self.address(node)

    def trainctl(
        self, *arguments: str, host: str = DESK, seconds: float = HANG_SECONDS, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        """The program on a host, the desk unless another is named."""
        command = [sys.executable, "-m", "trainctl.tui.cli.main", *arguments]
        return self.network.run(host, *command, seconds=seconds, **{**self.env(host), **env})

    def said(self, *arguments: str, **options: Any) -> dict[str, Any]:
        """The one JSON object that a command prints."""
        done = self.trainctl(*arguments, "--json", **options)
        assert done.stdout, (arguments, done.returncode, done.stderr)
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found

    def look(self) -> dict[str, Any]:
        """Return what the first node's agent tells a script on the desk, now."""
        if self._looker is None:
            self._looker = self.network.start(
                DESK, sys.executable, "-c", LOOK, self.address(NODES[0]), stdin=subprocess.PIPE, **self.env(DESK)
            )
            SHARED_PIDS.add(self._looker.pid)
        assert self._looker.stdin is not None and self._looker.stdout is not None
        self._looker.stdin.write("look\n")
        self._looker.stdin.flush()
        view: dict[str, Any] = json.loads(self._looker.stdout.readline())
        return view

    def wait(self, holds: Callable[[dict[str, Any]], Any], what: str, seconds: float = 90.0) -> dict[str, Any]:
        """Return what is seen once `holds` of it."""

        def look() -> dict[str, Any] | None:
            view = self.look()
            return view if holds(view) else None

        found: dict[str, Any] = until(look, seconds, what)
        return found

    def run_paths(self, node: str, run: str) -> RunPaths:
        return RunPaths(self.folder / node / "state" / node / "runs" / run)

    def close(self) -> None:
        """End the agents, and with the hosts what was on them."""
        said = {}
        if self._looker is not None:
            self._looker.communicate(timeout=HANG_SECONDS)
        for node, process in self.agents.items():
            process.terminate()
            _, error = process.communicate(timeout=HANG_SECONDS)
            if process.returncode != 0:
                said[node] = error
        self.network.close()
        assert not said, said
        left = [p for p in psutil.process_iter(["environ"]) if str(self.folder) in str(p.info["environ"] or "")]
        _, alive = psutil.wait_procs(left, timeout=HANG_SECONDS)
        for process in alive:
            process.kill()
        assert not alive, alive
