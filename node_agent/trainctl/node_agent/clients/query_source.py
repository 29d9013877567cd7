"""What a query reads: the agent, who is attached to it, and the record of a run."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol, TypeVar

import msgspec

from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import LiveFacts
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import refusing_damage
from trainctl.protocol.security.keyring import Keyring

EXPIRY_SECONDS = 20.0
"""Seconds after which a silent client counts as gone; clients report every 5 s."""
MAX_VIEWERS = 64


@dataclass(frozen=True)
class _Seen:
    view: m.Viewer
    heard_monotonic: float


class Presence:
    """The viewers by their own ids; bounded, so that no one can fill the agent's memory with names."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def hear(self, request: m.AttendRequest, now_monotonic: float, now: float) -> tuple[m.Viewer, ...]:
        """Takes down who asks, if it says who it is, and gives the others, oldest first."""
        since = now_monotonic - EXPIRY_SECONDS
        self._seen = {viewer: seen for viewer, seen in self._seen.items() if seen.heard_monotonic > since}
        known = self._seen.get(request.viewer)
        if request.leaving:
            self._seen.pop(request.viewer, None)
        elif request.viewer and (known is not None or len(self._seen) < MAX_VIEWERS):
            since_at = known.view.since_at if known is not None else now
            view = m.Viewer(by=request.by, since_at=since_at, read_only=request.read_only)
            self._seen[request.viewer] = _Seen(view, now_monotonic)
        others = [seen.view for viewer, seen in self._seen.items() if viewer != request.viewer]
        return tuple(sorted(others, key=lambda view: view.since_at))


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
    def dry_run(self, directory: Path, request: m.DryRunRequest) -> m.DryRun | None: ...
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
