"""The context that queries are answered from: the node, its peers, and the runs it leads, follows or knows."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import msgspec

from trainctl.node_agent.alerts.service import AlertService
from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.clients.record_copies import RecordCopies
from trainctl.node_agent.guests.guest_runs import GuestRuns
from trainctl.node_agent.records import run_folders
from trainctl.node_agent.records.agent_db import FollowedRun, KnownRun
from trainctl.node_agent.roles.follower import Follower
from trainctl.node_agent.roles.lead import Lead
from trainctl.node_agent.roles.rank_hosting import NO_RANK
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.files.durable_files import write_file
from trainctl.protocol.messages.requests import Request
from trainctl.protocol.messages.verbs import VERBS, StartRun, args_type
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.schema import refusing_damage
from trainctl.protocol.security.keys import default_folder

EXPIRY_SECONDS = 20.0
"""Seconds after which a silent client counts as gone; clients report every 5 s."""
MAX_VIEWERS = 64
ELSEWHERE_SECONDS = 3.0
"""Seconds another node's agent may take to answer a forwarded request; a client waits longer."""
T = TypeVar("T")
R = TypeVar("R", bound=messages.Reply)


@dataclass(frozen=True)
class _Seen:
    view: messages.Viewer
    heard_monotonic: float


class Presence:
    """The viewers by their own ids; bounded, so that no one can fill the agent's memory with names."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def hear(self, request: messages.AttendRequest, now_monotonic: float, now: float) -> tuple[messages.Viewer, ...]:
        """Takes down who asks, if it says who it is, and gives the others, oldest first."""
        since = now_monotonic - EXPIRY_SECONDS
        self._seen = {viewer: seen for viewer, seen in self._seen.items() if seen.heard_monotonic > since}
        known = self._seen.get(request.viewer)
        if request.leaving:
            self._seen.pop(request.viewer, None)
        elif request.viewer and (known is not None or len(self._seen) < MAX_VIEWERS):
            since_at = known.view.since_at if known is not None else now
            view = messages.Viewer(by=request.by, since_at=since_at, read_only=request.read_only)
            self._seen[request.viewer] = _Seen(view, now_monotonic)
        others = [seen.view for viewer, seen in self._seen.items() if viewer != request.viewer]
        return tuple(sorted(others, key=lambda view: view.since_at))


@dataclass(frozen=True)
class LiveRun:
    """An active run as its agent has it in memory."""

    view: messages.RunView
    last_step: messages.StepCommitted | None
    rank_steps: tuple[messages.RankStep, ...]
    alerts: messages.Alerts | None


class UnknownRunError(InvalidInputError):
    """A request named a run that this agent doesn't know."""


class UnknownRankError(InvalidInputError):
    """A request named a rank that this agent has no data of, and can get none."""


class QueryContext:
    """An agent as its clients see it; changes no run that is active."""

    def __init__(
        self, context: AgentContext, lead: Lead, follower: Follower, guests: GuestRuns, alerts: AlertService
    ) -> None:
        self._context, self.lead, self.follower, self.guests = context, lead, follower, guests
        self.alerts = alerts
        self.publisher: Publisher = context.publisher
        self.presence = Presence()
        self.doctor = Doctor(context.node, default_folder(), context.directory, self._run_files)
        self.record_copies = RecordCopies()
        self.host_reading: messages.HostReading | None = None
        self._removals: dict[str, asyncio.Task[int]] = {}  # by run

    @property
    def node(self) -> str:
        return self._context.node

    def node_view(self) -> messages.NodeView:
        own = self._context
        return messages.NodeView(
            node=own.node,
            boot=own.boot,
            address=own.address,
            live_address=own.live_address,
            host=self.host_reading,
            version=own.version,
        )

    def peer_views(self) -> tuple[messages.PeerView, ...]:
        return self.lead.peers.views

    async def rename_run(self, run: str, name: str) -> None:
        """Give a run another name here. Raises InvalidInputError, or RefusedError if the disk takes none."""
        known = self.known(run)
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
        size_bytes = await asyncio.to_thread(lambda: RunPaths(self.known(run).directory).size_bytes)
        known = self.known(run)  # from here to `forget_run` without a pause: nobody resumes it meanwhile
        if known.state in messages.ACTIVE_RUN_STATES or self.live_run(known.directory) is not None:
            raise InvalidInputError("run", f"{run} is active: stop it first with trainctl send stop --run {run}")
        self.lead.role.check_no_work()
        run_folders.mark_unstarted(known.directory)
        self._context.db.forget_run(run)
        await asyncio.to_thread(shutil.rmtree, known.directory, ignore_errors=True)
        left_bytes = await asyncio.to_thread(lambda: RunPaths(known.directory).size_bytes)
        if known.directory.exists():
            self._context.db.add_run(run, known.name, known.started_at, known.state, known.kind)  # to be tried again
            raise InvalidInputError("run", f"{left_bytes:,} bytes of {known.directory} can't be removed: remove them")
        run_folders.unmark(known.directory)
        return size_bytes

    def known(self, run: str) -> KnownRun:
        """A run of this node. Raises UnknownRunError."""
        known = self._context.db.known_run(run)
        if known is None:
            raise UnknownRunError("run", f"no run {run!r} on this node")
        return known

    def refusals(self, limit: int) -> tuple[messages.Refused, ...]:
        if self._context.authenticator is not None:
            self._context.authenticator.settle()
        return self._context.db.refusals(limit)

    def address_of(self, node: str) -> str | None:
        """Return the address at which another node's agent takes requests, None if the cluster has no such node."""
        address = self.lead.peers.address(node)
        if address is not None and self._context.keys is not None:
            self._context.keys.learn(address, self._context.cluster.nodes[node].key)  # it may have moved
        return address

    async def ask(self, node: str, request: Request[R], seconds: float = ELSEWHERE_SECONDS) -> R:
        """Return the reply of another node's agent to a client's request. Raises TrainctlError."""
        address = self.address_of(node)
        if address is None:
            raise RefusedError(f"{node} is not in the cluster file of {self.node}")
        async with self._context.client(address, seconds) as client:
            return await client.reply_to(request)

    def live_run(self, directory: Path) -> LiveRun | None:
        """The run in a directory as it is now, None if it isn't active."""
        return next((live for live in self.live_runs() if Path(live.view.directory) == directory), None)

    def led(self, directory: Path) -> Session | None:
        """The run in a directory if this agent leads it."""
        session = self.lead.session
        return session if session is not None and Path(session.view.directory) == directory else None

    def live_runs(self) -> tuple[LiveRun, ...]:
        """All runs that are active here, the hosted one first."""
        session, followed, alerts = self.lead.session, self.follower.followed, self.alerts.view
        guests = tuple(
            LiveRun(one.view, one.last_step, tuple(one.parts.values()), self.alerts.view_of_guest(one.view.run))
            for one in self.guests.live
        )
        if session is not None:
            return (LiveRun(session.view, session.last_step, tuple(session.rank_steps.values()), alerts), *guests)
        return (LiveRun(followed.look(), None, (), alerts), *guests) if followed is not None else guests

    def run_directory(self, run: str | None) -> Path | None:
        """Return a run's folder by its id; for None the active run's, of several the hosted one's, else the newest."""
        db, hosted = self._context.db, self.follower.followed or self.lead.session
        active = hosted or self.guests.find(None)
        if run is None and active is not None:
            return active.paths.directory
        known = db.known_run(run or self.lead.last_run or "")
        if known is None and run is None:
            known = next(iter(db.runs()), None)
        return known.directory if known is not None else None

    def redirect(self, command: messages.Command) -> messages.Refusal | None:
        """Return where a command about another node, or a run that one leads, should go; None: it is for this agent."""
        verb, node = VERBS.get(command.verb), command.node
        if verb is not None and verb.to_node and (verb.needs_node or node is not None):
            address = self.lead.peers.address(node) if node is not None else None
            if node is None or address is None:
                return None
            return self._not_lead(command, f"only {node} can do this; its agent is at {address}", node, address)
        own = self._context.db.known_run(command.run) if command.run is not None else None
        if self.alerts.knows(command) or (own is not None and own.kind != "hosted"):
            return None
        starts_run = args_type(command.verb) is StartRun
        if self.follower.followed is not None:
            known: FollowedRun | None = self.follower.followed.known
        elif starts_run:
            run = command.args.get("resume") or command.args.get("branch")
            known = self._context.db.followed(run.partition("@")[0]) if isinstance(run, str) else None
        else:
            known = self._handed_over() if self.lead.role.run is None else None
        if known is None or (starts_run and not self.lead.peers.is_open(known.lead)):
            return None
        text = f"{known.lead} leads {known.run}; its agent is at {known.address}"
        return self._not_lead(command, text, known.lead, known.address)

    def _not_lead(self, command: messages.Command, text: str, node: str, address: str) -> messages.Refusal:
        entry = self._context.cluster.nodes.get(node)
        key = entry.key if entry is not None else None
        return messages.Refusal(rid=command.rid, code="not-lead", text=text, lead=address, lead_key=key)

    def _handed_over(self) -> FollowedRun | None:
        """The newest run of this node, if another one in touch leads it now and this one has no rank of it."""
        newest = next((known for known in self._context.db.runs() if known.kind == "hosted"), None)
        known = self._context.db.followed(newest.run) if newest is not None else None
        is_led = known is not None and known.rank == NO_RANK and self.lead.peers.is_open(known.lead)
        return known if is_led else None

    def led_elsewhere(self, run: str) -> str | None:
        """The node that leads a run of which this one, which did, has no rank; None if there is none."""
        known = self._context.db.followed(run)
        return known.lead if known is not None and known.rank == NO_RANK else None

    def _run_files(self) -> tuple[Path, ...]:
        known = (known for known in self._context.db.runs() if known.kind == "hosted")
        return tuple(RunPaths(one.directory).run_file for one in known)

    def known_runs(self) -> list[KnownRun]:
        """All runs of this node, newest first, those that are active as they are now."""
        live = {Path(one.view.directory): one.view.state for one in self.live_runs()}
        return [replace(known, state=live.get(known.directory, known.state)) for known in self._context.db.runs()]


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


def kept_view(reader: RecordReader) -> messages.RunView | None:
    """Return a run as its record last showed it, in the folder where it is now."""
    with refusing_damage(reader.path, msgspec.DecodeError):
        return reader.view()
