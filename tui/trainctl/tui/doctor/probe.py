"""Asks every node's agent for its facts and digests, tries its ports, and measures how far its clock is off."""

import asyncio
import errno
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainctl.protocol.client.client import Client
from trainctl.protocol.config import addresses, names, run_file
from trainctl.protocol.config.model_facts import model_folder
from trainctl.protocol.config.run_tables import DataKind, RunFile
from trainctl.protocol.errors import NotAuthorisedError, TrainctlError, UnreachableError, VersionError
from trainctl.protocol.machine import facts
from trainctl.protocol.machine.devices import read_devices
from trainctl.protocol.machine.file_digests import data_digests, model_digests
from trainctl.protocol.messages import Digests, DigestsRequest, Disk, DiskRequest, Facts, FactsRequest, SnapshotRequest
from trainctl.protocol.security import keys
from trainctl.tui.doctor.findings import Asset, Hashed, Look, Measured, Trouble

CONNECT_SECONDS, ANSWER_SECONDS = 3.0, 5.0
DIGEST_SECONDS = 1800.0
"""Hundreds of gigabytes may have to be read."""
DISK_SECONDS = 60.0
"""Writing and reading end after 2 s each; a slow disk may then still have to write what it has been given."""
ROUNDS = 5
"""Rounds, of which the quickest tells the clock's offset best."""


@dataclass(frozen=True)
class Round:
    """One question and its answer, by both clocks (Unix seconds)."""

    sent_at: float  # here
    received_at: float  # there
    answered_at: float  # there
    got_at: float  # here

    @property
    def trip_seconds(self) -> float:
        """Seconds on the way, both ways."""
        return max(0.0, (self.got_at - self.sent_at) - (self.answered_at - self.received_at))

    @property
    def offset_seconds(self) -> float:
        """The other clock less ours (RFC 5905, section 8)."""
        return ((self.received_at - self.sent_at) + (self.answered_at - self.got_at)) / 2


def here() -> Facts:
    """This machine, as far as it shows without an agent."""
    name = names.node_name()
    return facts.gather(name, keys.default_folder(), names.node_directory(name), devices=read_devices())


async def look(name: str, address: str, here: Facts) -> Look:
    """Look at one node; what goes wrong is in the answer."""
    trouble = await try_port(address)
    if trouble is not None:
        return Look(name, address, trouble=trouble)
    try:
        async with Client(address, timeout_seconds=ANSWER_SECONDS) as client:
            snapshot = await client.ask(SnapshotRequest, 0)
            live_address = client.live_address(snapshot.node)
            asked = [await ask_round(client) for _ in range(ROUNDS)]
    except TrainctlError as error:
        return Look(name, address, trouble=_trouble(error))
    best, answer = min(asked, key=lambda one: one[0].trip_seconds)
    return Look(
        name or answer.node,
        address,
        answer,
        live_trouble=await try_port(live_address),
        live_address=live_address,
        round_trip_seconds=best.trip_seconds,
        clock_offset_seconds=best.offset_seconds,
        is_here=_is_here(address, answer, here),
        hook_problem=snapshot.alerts.hook_problem if snapshot.alerts is not None else "",
    )


async def ask_round(client: Client) -> tuple[Round, Facts]:
    """Return the agent's facts, and when it was asked and answered."""
    sent_at, began = time.time(), time.perf_counter()
    answer = await client.ask(FactsRequest)
    return Round(sent_at, answer.received_at, answer.at, sent_at + time.perf_counter() - began), answer


def _is_here(address: str, answer: Facts, here: Facts) -> bool:
    """Return whether the node is this machine: a loopback address may be a port forwarded to another one."""
    host = addresses.host(address)
    own = {text.split("/")[0] for interface in here.interfaces for text in interface.addresses}
    alike = (answer.system, answer.release, answer.machine, answer.memory_total_bytes)
    return (addresses.is_loopback(host) or host in own) and alike == (
        here.system,
        here.release,
        here.machine,
        here.memory_total_bytes,
    )


async def try_port(address: str) -> Trouble | None:
    """Return why a connection can't be made, if it can't."""
    parts, path = addresses.split(address), addresses.socket_path(address)
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            if path is not None:
                _, writer = await asyncio.open_unix_connection(path)
            else:
                _, writer = await asyncio.open_connection(parts.hostname, parts.port)
    except TimeoutError:
        return Trouble("timeout", f"no answer within {CONNECT_SECONDS:g} s")
    except OSError as error:
        return _of_errno(error)
    writer.close()
    return None


def _of_errno(error: OSError) -> Trouble:
    if isinstance(error, ConnectionRefusedError | FileNotFoundError):
        return Trouble("refused", "connection refused")
    if error.errno in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN):
        return Trouble("no-route", error.strerror or "no route to host")
    return Trouble("other", error.strerror or str(error))


def _trouble(error: TrainctlError) -> Trouble:
    match error:
        case NotAuthorisedError():
            return Trouble("not-authorised", str(error))
        case VersionError():
            return Trouble("version", str(error))
        case UnreachableError():
            return Trouble("silent", str(error))
        case _:
            return Trouble("protocol", str(error))


async def looks(nodes: Sequence[tuple[str, str]], here: Facts) -> tuple[Look, ...]:
    """Look at all nodes (name, address) at once."""
    return tuple(await asyncio.gather(*(look(name, address, here) for name, address in nodes)))


async def measured(run: RunFile | None, looks: Sequence[Look]) -> tuple[Measured, ...]:
    """Return the disk of each node's token caches, one node after another: several may share a disk."""
    found = []
    for look in _of_run(run, looks):
        table = run.nodes.get(look.name) if run is not None else None
        path = (table and table.cache_path) or ""
        try:
            async with Client(look.address, timeout_seconds=DISK_SECONDS) as client:
                answer = await client.ask(DiskRequest, path)
        except TrainctlError as error:
            answer = Disk(rid="", folder=path, problem=str(error))
        found.append(Measured(look.name, path, answer))
    return tuple(found)


def _of_run(run: RunFile | None, looks: Sequence[Look]) -> list[Look]:
    """Return the nodes of the run that answered; without a run file, all that did."""
    return [one for one in looks if one.facts is not None and (run is None or not run.nodes or one.name in run.nodes)]


async def hashed(run: RunFile, looks: Sequence[Look]) -> tuple[Hashed, ...]:
    """Model and data as every node of the run that answered has them, all nodes at once; no file that grows."""
    found = await asyncio.gather(*(_hashed(run, one) for one in _of_run(run, looks)))
    return tuple(item for items in found for item in items)


async def _hashed(run: RunFile, look: Look) -> list[Hashed]:
    own = run_file.on_node(run, look.name)
    async with Client(look.address, timeout_seconds=DIGEST_SECONDS) as client:
        made = []
        paths: dict[Asset, str] = {
            "model": own.model.path,
            "data": own.data.path,
            "held-out data": own.data.held_out_path,
        }
        for what, path in paths.items():
            if not path or (what == "data" and own.data.growing):
                continue
            try:
                answer = await client.ask(
                    DigestsRequest, "model" if what == "model" else "data", str(Path(path)), own.data.kind
                )
            except TrainctlError as error:
                answer = Digests(rid="", digest="", problem=str(error))
            if not answer.named and look.is_here:
                answer = await asyncio.to_thread(_read_here, what, path, own.data.kind)
            made.append(Hashed(look.name, what, path, answer))
        return made


def _read_here(what: Asset, path: str, kind: DataKind) -> Digests:
    """Before a run names them to the agent of this machine, its user may read them."""
    here = model_folder(path) if what == "model" else Path(path)
    if not here.is_absolute():
        return Digests(rid="", digest="", problem="not in the Hugging Face cache")
    try:
        found = model_digests(here) if what == "model" else data_digests(here, kind)
    except OSError as error:
        return Digests(rid="", digest="", problem=f"{error.filename or path}: {error.strerror or error}")
    return Digests(rid="", digest=found.whole, files=found.files)
