"""What a query reads: the agent, and the record of a run."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.clients.presence import Presence
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import LiveFacts
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import refusing_damage
from trainctl.protocol.security.keyring import Keyring

T = TypeVar("T")


class LiveRun(NamedTuple):
    """An active run as its agent has it in memory."""

    view: m.RunView
    last_step: m.StepCommitted | None
    rank_steps: tuple[m.RankStep, ...]
    alerts: m.Alerts | None


class QuerySource(Protocol):
    """What the handlers see of the agent."""

    publisher: Publisher
    presence: Presence
    doctor: Doctor

    @property
    def node(self) -> str: ...
    def node_view(self) -> m.NodeView: ...
    def peer_views(self) -> tuple[m.PeerView, ...]: ...
    def address_of(self, node: str) -> str | None: ...
    def live_run(self, directory: Path) -> LiveRun | None: ...
    def live_runs(self) -> tuple[LiveRun, ...]: ...
    def run_directory(self, run: str | None) -> Path | None: ...
    def run_summaries(self) -> list[tuple[str, str, str, m.RunState, float]]: ...
    def ended_as(self, run: str) -> tuple[m.RunState, str]: ...
    def led_elsewhere(self, run: str) -> str | None: ...
    def now(self) -> float: ...
    def alerts(self) -> m.Alerts: ...
    async def rename_run(self, run: str, name: str) -> None: ...
    async def remove_run(self, run: str) -> int: ...
    async def test_hooks(self, rid: str) -> tuple[m.HookOutcome, ...]: ...
    def policy_statuses(self, directory: Path) -> tuple[m.PolicyStatus, ...] | None: ...
    def live_facts(self, directory: Path) -> LiveFacts | None: ...
    def refusals(self, limit: int) -> tuple[m.Refused, ...]: ...
    @property
    def keys(self) -> Keyring | None: ...


class UnknownRunError(InvalidInputError):
    """A request named a run that this agent doesn't know."""


class UnknownRankError(InvalidInputError):
    """A request named a rank that this agent has no data of, and can get none."""


def run_paths(run: str | None, source: QuerySource) -> RunPaths:
    directory = source.run_directory(run)
    if directory is None:
        raise UnknownRunError(
            "run", "no run yet; start one with trainctl run" if run is None else f"no run {run!r} on this node"
        )
    return RunPaths(directory)


async def from_record(paths: RunPaths, read: Callable[[RecordReader], T]) -> T:
    """What `read` gives, in a thread."""

    def reading() -> T:
        with RecordReader(paths) as reader:
            return read(reader)

    return await asyncio.to_thread(reading)


def kept_view(reader: RecordReader) -> m.RunView | None:
    """Return a run as its record last showed it, in the folder where it is now."""
    with refusing_damage(reader.path, msgspec.DecodeError):
        return reader.view()
