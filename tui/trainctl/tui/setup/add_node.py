"""The steps of `trainctl cluster add`, one line each, with the test of the link to the new node's agent. This machine's
files come last: a failure leaves none.
"""

import asyncio
import ipaddress
import json
import secrets
import socket
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.protocol.client.client import Client
from trainctl.protocol.config import addresses, cluster_file, names
from trainctl.protocol.errors import InvalidInputError, NotAuthorisedError, TrainctlError, UnreachableError
from trainctl.protocol.machine.speeds import exchange
from trainctl.protocol.messages import Facts
from trainctl.protocol.security import keys
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.wire import sockets
from trainctl.tui.doctor.probe import ask_round
from trainctl.tui.setup import remote_install
from trainctl.tui.setup.remote_install import Install, RemoteMachine, find
from trainctl.tui.setup.remote_side import add_nodes
from trainctl.tui.setup.rsync import Ssh, SshTarget, said

ROUNDS = 20
ANSWER_SECONDS, AWAIT_SECONDS = 3.0, 30.0
STREAM_SECONDS = 10.0


@dataclass(frozen=True)
class Link:
    """The link to a node's agent, as it was measured."""

    facts: Facts
    round_trip_seconds: float  # median
    bytes_per_second: float | None  # from there to here, over one TCP connection; None: not measured
    why: str = ""  # it isn't measured
    sent_bytes_per_second: float | None = None  # from here to there, at the same time


def test(ssh: Ssh, python: str, address: str, ring: Keyring) -> Link:
    """Waits for the agent. Raises UnreachableError, NotAuthorisedError."""
    facts, trip_seconds = asyncio.run(_answers(address, ring))
    host = addresses.host(address)
    try:
        received, sent = _exchange(ssh, python, host)
    except (OSError, ValueError) as error:
        return Link(facts, trip_seconds, None, str(error) or type(error).__name__)
    return Link(facts, trip_seconds, received, "", sent)


async def _answers(address: str, ring: Keyring) -> tuple[Facts, float]:
    deadline = time.monotonic() + AWAIT_SECONDS
    while True:
        try:
            async with Client(address, timeout_seconds=ANSWER_SECONDS, keys=ring) as client:
                asked = [await ask_round(client) for _ in range(ROUNDS)]
            return asked[-1][1], statistics.median(one.trip_seconds for one, _ in asked)
        except UnreachableError as error:
            if time.monotonic() > deadline:
                raise UnreachableError(f"{error} (for {AWAIT_SECONDS:g} s)") from None
            await asyncio.sleep(0.2)


def _exchange(ssh: Ssh, python: str, host: str) -> tuple[float, float]:
    """Bytes per second that one plain TCP connection to that address carries from there and to there, both directions
    at once. Raises OSError or ValueError."""
    token = secrets.token_hex(16)
    command = ssh.command([python, "-m", "trainctl.tui.setup.remote_side", "stream"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        assert sender.stdin is not None and sender.stdout is not None and sender.stderr is not None
        try:
            sender.stdin.write(json.dumps({"host": host, "token": token}).encode())
            sender.stdin.close()
            line = sender.stdout.readline()
            if not line:
                raise ValueError(said(sender.stderr.read().decode("utf-8", "replace")))
            received = _received(host, json.loads(line)["port"], token)
            return received, json.loads(sender.stdout.readline())["bytes_per_second"]
        finally:
            sender.terminate()


def _received(host: str, port: int, token: str) -> float:
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(STREAM_SECONDS)
        connection.sendall(token.encode())
        return exchange(connection)


_THERE = "trainctl.tui.setup.remote_side"
START_SECONDS = 180.0
Say = Callable[["Step"], None]


@dataclass(frozen=True)
class Step:
    """One that is done."""

    name: str
    changed: bool  # False: it was so already
    text: str


@dataclass(frozen=True)
class AddNodeOptions:
    """A node to add, as the options describe it. None is the default."""

    target: SshTarget
    name: str | None = None
    address: str | None = None
    here: str | None = None  # this machine's node
    install: Install = field(default_factory=Install)
    interactive: bool = True


@dataclass(frozen=True)
class Pair:
    """The two nodes, and the cluster as this machine knows it."""

    file: Path  # of the cluster
    known: cluster_file.Cluster
    here: str
    here_address: str
    there: str
    there_address: str


@dataclass(frozen=True)
class Added:
    """A node that was added."""

    node: str
    address: str
    steps: tuple[Step, ...]
    link: Link
    remarks: tuple[str, ...]


def add(wanted: AddNodeOptions, file: Path, known: cluster_file.Cluster, say: Say) -> Added:
    """Add a node to the cluster that is kept in `file`. Raises TrainctlError naming the step that failed and what was
    said there."""
    steps: list[Step] = []

    def done(name: str, changed: bool, text: str) -> None:
        steps.append(Step(name, changed, text))
        say(steps[-1])

    built = remote_install.build_wheel()
    with Ssh(wanted.target, interactive=wanted.interactive) as ssh:
        machine = find(ssh, wanted.install.python)
        done("connect", False, f"{wanted.target.words}: Python {machine.version}, {machine.system}")
        pair = _pair(wanted, machine, file, known)
        changed, text = wanted.install.carry_out(ssh, machine, built)
        done("install", changed, text)
        restarts = changed
        made = keys.KeyFolder().make(pair.here)
        done("keys here", bool(made), f"created {' and '.join(made)}" if made else "already exist")
        python = str(machine.python_of_program)
        joined = _called(ssh, python, "join", _join_words(pair))
        done("keys there", bool(joined["changed"]), ", ".join(joined["changed"]) or "already exchanged")
        restarts = restarts or any(not one.startswith("authorised") for one in joined["changed"])
        started = _called(ssh, python, "start", {"name": pair.there, "restart": restarts})
        done("start", started["changed"], _start_text(started))
        ring = Keyring(nodes=known)
        ring.learn(pair.there_address, joined["key"])
        try:
            tested = test(ssh, python, pair.there_address, ring)
        except (UnreachableError, NotAuthorisedError) as error:
            raise type(error)(f"link: {error}") from None
        done("link", False, _link_text(tested))
    written = add_nodes(pair.file, pair.known, _nodes_here(pair, joined["key"], wanted.target.words))
    done("nodes here", bool(written), ", ".join(written) or "already listed")
    remarks = [*started["remarks"], *_remarks(pair, tested, joined["key"], changed=bool(written))]
    return Added(pair.there, pair.there_address, tuple(steps), tested, tuple(remarks))


def _called(ssh: Ssh, python: str, what: str, given: dict[str, Any]) -> dict[str, Any]:
    step = {"join": "keys there", "start": "start"}[what]
    out = ssh.run([python, "-m", _THERE, what], given=json.dumps(given).encode(), seconds=START_SECONDS, step=step)
    try:
        found: dict[str, Any] = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise TrainctlError(f"{step}: unexpected answer: {out[:200]!r}") from None
    return found


# ---------------------------------------------------------------- who is who


def _pair(wanted: AddNodeOptions, machine: RemoteMachine, file: Path, known: cluster_file.Cluster) -> Pair:
    """Names and addresses of both. Raises InvalidInputError where they can't be these."""
    here = wanted.here or names.node_name()
    if wanted.here is not None and wanted.here not in known.nodes:
        raise InvalidInputError(
            "--here", f"no node {wanted.here!r} in {file}; the nodes are {', '.join(known.nodes) or 'none'}"
        )
    there = wanted.name or names.node_name(machine.host)
    if there == here:
        raise InvalidInputError(
            "--name", f"{there!r} is this machine's own name; give the new node a different one with --name"
        )
    entry, old = known.nodes.get(here), known.nodes.get(there)
    there_address = wanted.address or (old.address if old else _address(machine.address_there))
    here_address = entry.address if entry is not None else _address(machine.address_here)
    for address in (there_address, here_address):
        addresses.split(address)
    if addresses.is_near(here_address) and not addresses.is_near(there_address):
        raise InvalidInputError(
            f"{file}: nodes.{here}.address",
            f"{there} can't reach this machine at {here_address}; it sees it at {machine.address_here}: use "
            f"{_address(machine.address_here)}",
        )
    return Pair(file, known, here, here_address, there, there_address)


def _address(host: str) -> str:
    return f"tcp://{f'[{host}]' if ':' in host else host}:{sockets.DEFAULT_PORT}"


def _join_words(pair: Pair) -> dict[str, Any]:
    folder = keys.KeyFolder()
    user = folder.user()
    others = {
        name: {"address": entry.address, "key": entry.key}
        for name, entry in pair.known.nodes.items()
        if entry.key and name not in (pair.there, pair.here)
    }
    own = {"address": pair.here_address, "key": folder.agent().public}
    return {
        "name": pair.there,
        "address": pair.there_address,
        "nodes": {pair.here: own, **others},
        "user": {"name": user.name, "key": user.public},
        "networks": list(pair.known.trusted_networks),
    }


def _nodes_here(pair: Pair, key: str, ssh: str) -> dict[str, dict[str, str]]:
    own = {"address": pair.here_address, "key": keys.KeyFolder().agent().public}
    return {pair.here: own, pair.there: {"address": pair.there_address, "key": key, "ssh": ssh}}


# ---------------------------------------------------------------- what is said


def _start_text(started: dict[str, Any]) -> str:
    how = "as that user's service" if started["how"] == "service" else f"detached, without a service ({started['why']})"
    return f"the agent runs {how}" if started["changed"] else f"the agent is already running, {how}"


def _link_text(tested: Link) -> str:
    trip = f"{tested.round_trip_seconds * 1000:.2f} ms round trip (median of {ROUNDS})"
    if tested.bytes_per_second is None:
        return f"{trip}; throughput not measured: {tested.why}"
    sent = f" and {tested.sent_bytes_per_second / 1e9:.2f} GB/s to it" if tested.sent_bytes_per_second else ""
    return f"{trip}, {tested.bytes_per_second / 1e9:.2f} GB/s from it{sent} at once (one TCP connection)"


def _remarks(pair: Pair, tested: Link, key: str, *, changed: bool) -> list[str]:
    """Return what is left to a person."""
    said = ["restart this machine's agent so that it learns about the node: trainctl-agent run"] if changed else []
    old = pair.known.nodes.get(pair.there)
    if old is not None and old.key is None:
        said.append(f"{pair.file} lists {pair.there} without its key: add key = '{key}' to that file yourself")
    host = addresses.host(pair.there_address)
    found = [
        (one.name, ipaddress.ip_interface(address))
        for one in tested.facts.interfaces
        for address in one.addresses
        if address.split("/")[0] == host
    ]
    if found and not found[0][1].is_loopback:
        name, interface = found[0]
        said.append(f'name its network interface in run files: [nodes.{pair.there}] interface = "{name}"')
        if not pair.known.trusts(host):
            said.append(
                "gradients are not encrypted; if only your machines are on that network, put "
                f'trusted_networks = ["{interface.network}"] at the top of cluster.toml on both machines'
            )
    third = [name for name in pair.known.nodes if name not in (pair.here, pair.there)]
    if third and changed:
        said.append(f"{', '.join(third)} don't know the new node yet: run trainctl cluster add again for each of them")
    return said
