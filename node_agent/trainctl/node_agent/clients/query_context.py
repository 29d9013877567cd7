"""The context that queries are answered from: the node, its peers, and the runs it leads, follows or knows."""

import asyncio
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from trainctl.node_agent.alerts.service import AlertService
from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.clients.record_copies import RecordCopies
from trainctl.node_agent.conductor.dry_run import dry_run
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records.agent_db import FollowedRun, KnownRun
from trainctl.node_agent.roles.follower import Follower
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.roles.rank_hosting import NO_RANK
from trainctl.node_agent.runs import unstarted
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import LiveFacts
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import write_file
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    Alerts,
    AttendRequest,
    DryRun,
    DryRunRequest,
    HookOutcome,
    HostReading,
    NodeView,
    PeerView,
    PolicyStatus,
    RankStep,
    Refused,
    RunState,
    RunView,
    StepCommitted,
    Viewer,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import refusing_damage
from trainctl.protocol.security.keyring import Keyring
from trainctl.protocol.security.keys import default_folder

EXPIRY_SECONDS = 20.0
"""Seconds after which a silent client counts as gone; clients report every 5 s."""
MAX_VIEWERS = 64


@dataclass(frozen=True)
class _Seen:
    view: Viewer
    heard_monotonic: float


class Presence:
    """The viewers by their own ids; bounded, so that no one can fill the agent's memory with names."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def hear(self, request: AttendRequest, now_monotonic: float, now: float) -> tuple[Viewer, ...]:
        """Takes down who asks, if it says who it is, and gives the others, oldest first."""
        since = now_monotonic - EXPIRY_SECONDS
        self._seen = {viewer: seen for viewer, seen in self._seen.items() if seen.heard_monotonic > since}
        known = self._seen.get(request.viewer)
        if request.leaving:
            self._seen.pop(request.viewer, None)
        elif request.viewer and (known is not None or len(self._seen) < MAX_VIEWERS):
            since_at = known.view.since_at if known is not None else now
            view = Viewer(by=request.by, since_at=since_at, read_only=request.read_only)
            self._seen[request.viewer] = _Seen(view, now_monotonic)
        others = [seen.view for viewer, seen in self._seen.items() if viewer != request.viewer]
        return tuple(sorted(others, key=lambda view: view.since_at))


T = TypeVar("T")


class LiveRun(NamedTuple):
    """An active run as its agent has it in memory."""

    view: RunView
    last_step: StepCommitted | None
    rank_steps: tuple[RankStep, ...]
    alerts: Alerts | None


class UnknownRunError(InvalidInputError):
    """A request named a run that this agent doesn't know."""


class UnknownRankError(InvalidInputError):
    """A request named a rank that this agent has no data of, and can get none."""


class QueryContext:
    """An agent as its clients see it; changes no run that is active."""

    def __init__(
        self, context: AgentContext, lead: Lead, follower: Follower, guests: GuestRuns, alerts: AlertService
    ) -> None:
        self._context, self._lead, self._follower, self._alerts = context, lead, follower, alerts
        self._guests = guests
        self.publisher: Publisher = context.publisher
        self.presence = Presence()
        self.doctor = Doctor(context.node, default_folder(), context.directory, self._run_files)
        self.record_copies = RecordCopies()
        self.host_reading: HostReading | None = None
        self._removals: dict[str, asyncio.Task[int]] = {}  # by run

    @property
    def node(self) -> str:
        return self._context.node

    def node_view(self) -> NodeView:
        own = self._context
        return NodeView(
            node=own.node,
            boot=own.boot,
            address=own.address,
            live_address=own.live_address,
            host=self.host_reading,
            version=own.version,
        )

    def peer_views(self) -> tuple[PeerView, ...]:
        return self._lead.peers.views

    @property
    def keys(self) -> Keyring | None:
        """Return what other agents are asked with on behalf of clients."""
        return self._context.authenticator.keyring if self._context.authenticator is not None else None

    def alerts(self) -> Alerts:
        return self._alerts.view

    async def test_hooks(self, rid: str) -> tuple[HookOutcome, ...]:
        return await self._alerts.test_hooks(rid)

    async def rename_run(self, run: str, name: str) -> None:
        """Give a run another name here. Raises InvalidInputError, or RefusedError if the disk takes none."""
        known = self._known(run)
        try:
            await asyncio.to_thread(write_file, RunPaths(known.directory).name_file, f"{name}\n".encode())
        except OSError as error:
            raise RefusedError(f"cannot rename {run}: {error}") from None
        self._context.db.rename_run(run, name)

    async def remove_run(self, run: str) -> int:
        """Remove a run that has ended here, and return how many bytes that frees. A request that is repeated has the
        outcome of its first. Raises InvalidInputError."""
        before = self._removals.get(run)
        if before is None or (before.done() and self._context.db.known_run(run) is not None):
            self._removals[run] = asyncio.create_task(self._remove(run), name="trainctl-remove")
        try:
            return await asyncio.shield(self._removals[run])
        except InvalidInputError:
            self._removals.pop(run, None)
            raise

    async def _remove(self, run: str) -> int:
        size_bytes = await asyncio.to_thread(lambda: RunPaths(self._known(run).directory).size_bytes)
        known = self._known(run)  # from here to `forget_run` without a pause: nobody resumes it meanwhile
        if known.state in ACTIVE_RUN_STATES or self.live_run(known.directory) is not None:
            raise InvalidInputError("run", f"{run} is active: stop it first with trainctl send stop --run {run}")
        self._lead.check_no_work()
        unstarted.mark(known.directory)
        self._context.db.forget_run(run)
        await asyncio.to_thread(shutil.rmtree, known.directory, ignore_errors=True)
        left_bytes = await asyncio.to_thread(lambda: RunPaths(known.directory).size_bytes)
        if known.directory.exists():
            self._context.db.add_run(run, known.name, known.started_at, known.state, known.kind)  # to be tried again
            raise InvalidInputError("run", f"{left_bytes:,} bytes of {known.directory} can't be removed: remove them")
        unstarted.unmark(known.directory)
        return size_bytes

    def _known(self, run: str) -> KnownRun:
        known = self._context.db.known_run(run)
        if known is None:
            raise UnknownRunError("run", f"no run {run!r} on this node")
        return known

    def refusals(self, limit: int) -> tuple[Refused, ...]:
        if self._context.authenticator is not None:
            self._context.authenticator.settle()
        return self._context.db.refusals(limit)

    def address_of(self, node: str) -> str | None:
        """Where another node's agent takes requests, None if the cluster has no such node."""
        address = self._lead.peers.address(node)
        if address is not None and self.keys is not None:
            self.keys.learn(address, self._context.cluster.nodes[node].key)  # it may have moved
        return address

    def live_run(self, directory: Path) -> LiveRun | None:
        """The run in a directory as it is now, None if it isn't active."""
        return next((live for live in self.live_runs() if Path(live.view.directory) == directory), None)

    def policy_statuses(self, directory: Path) -> tuple[PolicyStatus, ...] | None:
        """Return what the policies see of the run in a directory; None if this agent doesn't lead it."""
        session = self._lead.session
        is_led = session is not None and Path(session.view.directory) == directory
        return session.conductor.proposals.policy_statuses() if session is not None and is_led else None

    def dry_run(self, directory: Path, request: DryRunRequest) -> DryRun | None:
        """Return what a command would do to the run in a directory; None if this agent doesn't lead it."""
        session = self._lead.session
        is_led = session is not None and Path(session.view.directory) == directory
        return dry_run(session.conductor, request, time.monotonic()) if session is not None and is_led else None

    def live_facts(self, directory: Path) -> LiveFacts | None:
        """Return what this agent knows of the run in a directory that its record doesn't; None if it doesn't lead
        it."""
        session = self._lead.session
        is_led = session is not None and Path(session.view.directory) == directory
        return session.live_facts(self._alerts.view.alerts) if session is not None and is_led else None

    def live_runs(self) -> tuple[LiveRun, ...]:
        """All runs that are active here, the hosted one first."""
        session, followed, alerts = self._lead.session, self._follower.followed, self._alerts.view
        guests = tuple(
            LiveRun(one.view, one.last_step, tuple(one.parts.values()), self._alerts.view_of_guest(one.view.run))
            for one in self._guests.live
        )
        if session is not None:
            return (LiveRun(session.view, session.last_step, tuple(session.rank_steps.values()), alerts), *guests)
        return (LiveRun(followed.look(), None, (), alerts), *guests) if followed is not None else guests

    def run_directory(self, run: str | None) -> Path | None:
        """Return a run's folder by its id; for None the active run's, of several the hosted one's, else the newest."""
        followed = self._follower.followed
        if run is None and followed is not None:
            return followed.paths.directory
        if run is None and self._lead.session is None and (guest := self._guests.find(None)) is not None:
            return guest.paths.directory
        return self._lead.directory(run)

    def ended_as(self, run: str) -> tuple[RunState, str]:
        """State and reason of a run that isn't active, as the db has them."""
        return next((known.state, known.reason) for known in self._context.db.runs() if known.run == run)

    def handed_over(self) -> FollowedRun | None:
        """The newest run of this node, if another one in touch leads it now and this one has no rank of it."""
        newest = next((known for known in self._context.db.runs() if known.kind == "hosted"), None)
        known = self._context.db.followed(newest.run) if newest is not None else None
        is_led = known is not None and known.rank == NO_RANK and self._lead.peers.is_open(known.lead)
        return known if is_led else None

    def led_elsewhere(self, run: str) -> str | None:
        """The node that leads a run of which this one, which did, has no rank; None if there is none."""
        known = self._context.db.followed(run)
        return known.lead if known is not None and known.rank == NO_RANK else None

    def _run_files(self) -> tuple[Path, ...]:
        known = (known for known in self._context.db.runs() if known.kind == "hosted")
        return tuple(RunPaths(one.directory).run_file for one in known)

    def run_summaries(self) -> list[tuple[str, str, str, RunState, float]]:
        """(run, name, directory, state, started at) of every run, newest first; the active one as it is now."""
        rows: list[tuple[str, str, str, RunState, float]] = []
        for known in self._context.db.runs():
            live = self.live_run(known.directory)
            state = live.view.state if live is not None else known.state
            rows.append((known.run, known.name, str(known.directory), state, known.started_at))
        return rows


def run_paths(run: str | None, source: QueryContext) -> RunPaths:
    directory = source.run_directory(run)
    if directory is None:
        raise UnknownRunError(
            "run", "no run yet; start one with trainctl run" if run is None else f"no run {run!r} on this node"
        )
    return RunPaths(directory)


async def from_record(paths: RunPaths, read: Callable[[RecordReader], T]) -> T:
    """Return what `read` gives, in a thread."""

    def reading() -> T:
        with RecordReader(paths) as reader:
            return read(reader)

    return await asyncio.to_thread(reading)


def kept_view(reader: RecordReader) -> RunView | None:
    """Return a run as its record last showed it, in the folder where it is now."""
    with refusing_damage(reader.path, msgspec.DecodeError):
        return reader.view()
