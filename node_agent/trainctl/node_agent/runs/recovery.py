"""Recovery of a run that lost all ranks: it resumes from its newest checkpoint, with the nodes that are reachable."""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass

import msgspec

from trainctl.node_agent.conductor.restarts import MIN_BACKOFF_SECONDS, STARTS, backoff_seconds
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.launch import RollbackGoneError
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import BusyError, InvalidInputError, RefusedError
from trainctl.protocol.messages import Command, RunState, RunView
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.paths import RunPaths

ABSENT_SECONDS = 10.0
"""Seconds a run that goes back waits for nodes that it can do without."""

Begin = Callable[[str, Collection[int]], Awaitable[Session | None]]
"""Resumes a run without some of its ranks; None if it has ended at once. Raises InvalidInputError or RefusedError."""


class _NothingInReachError(Exception):
    """The text says what has been waited for, and what would help."""


@dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run goes back to."""

    ranks: dict[int, str]  # the nodes of its ranks
    source: Source
    limit_seconds: float  # for how long the node of the source may be unreachable


@dataclass(frozen=True)
class Absent:
    """Ranks whose nodes are unreachable, or are about to leave and take no rank."""

    ranks: dict[int, str]
    wanted: str  # which of these nodes it waits for, and until when; empty if it can do without them
    given_up: str  # which has the newest checkpoint and is waited for no more; empty if none


class Recovery:
    """At most one run, from the loss of its last rank until it is led again or given up."""

    def __init__(self, context: AgentContext, peers: Peers, begin: Begin) -> None:
        self._context, self._peers, self._begin = context, peers, begin
        self._backoff = Backoff()
        self.reason = ""  # of the last loss
        self._shown: RunView | None = None
        self._way: ResumePoint | None = None

    def take(self, session: Session, reason: str) -> float | None:
        """Return the time (time.monotonic) at which a run without ranks is taken up; None if it goes back no more."""
        self.reason = reason
        conductor = session.conductor
        if conductor.durable.rollback is not None or conductor.ending.has_halved:
            self._backoff.forget()  # a rollback is no failure, and smaller micro-batches come to an end
        due = self._backoff.take(session.run, session.conductor.progress.step)
        if due is not None:
            self._context.db.set_run_state(session.run, "starting")
            self._shown, self._way = session.view, None
        return due

    def forget(self) -> None:
        """Something else begins, or another node leads it."""
        self._backoff.forget()

    def stop(self, run: str, ordered: Command) -> int:
        """Have the run that waits end instead, and not go back when it is resumed. Returns its last step."""
        self._backoff.forget()
        paths, reason = self._paths(run), self.reason
        try:
            if paths is not None:
                restore.call_rollback_off(paths)
        except InvalidInputError as error:
            reason += f"; its rollback is still pending: {error}"
        self._end(run, "stopped", reason, ordered)
        return self._shown.step if self._shown is not None else 0

    async def take_up(self, run: str, superseded: str) -> float | None:
        """Take up the run that was due. Gives when it is due again if it can't be taken up yet; None if it was, or has
        failed after so many tries. `superseded`: why another node must be leading it, empty if none is known to."""
        try:
            if superseded:
                return self._hold(f"the run's lead to be known: {superseded}")
            absent = await self._absent(run)
            if absent.wanted or (absent.ranks and self._backoff.held_seconds < ABSENT_SECONDS):
                return self._hold(absent.wanted)
            if absent.given_up:
                await self._check_older(run, absent.ranks, absent.given_up)
            session = await self._begin(run, absent.ranks)
            if session is not None:
                _tell(session, absent.ranks, absent.given_up)
            return None
        except BusyError as error:
            return self._hold(f"its record: {error}")
        except (_NothingInReachError, RollbackGoneError) as error:
            self._backoff.forget()
            due, why = None, str(error)
        except (InvalidInputError, RefusedError) as error:
            due, why = self._backoff.again(), str(error)
        if due is None:
            self._end(run, "failed", f"{self.reason}; the run cannot go back to a checkpoint: {why}")
        return due

    def _paths(self, run: str) -> RunPaths | None:
        known = self._context.db.known_run(run)
        return RunPaths(known.directory) if known is not None else None

    async def _absent(self, run: str) -> "Absent":
        paths, links = self._paths(run), self._peers.links
        if paths is None:
            return Absent({}, "", "")
        if self._way is None:  # reading a whole checkpoint takes time, and none is written meanwhile
            self._way = await asyncio.to_thread(_look, paths, self._context.node)
        out_seconds = {node: link.silent_seconds for node, link in links.items() if not link.line.open or link.leaving}
        return absent(self._way, out_seconds)

    async def _check_older(self, run: str, absent: Mapping[int, str], given_up: str) -> None:
        """Raises _NothingInReachError if no other checkpoint is reachable."""
        paths = self._paths(run)
        out = set(absent.values())
        older = (
            await asyncio.to_thread(
                checkpoint_source.find, paths, self._context.node, out, at_most=restore.rollback_step(paths)
            )
            if paths is not None
            else Source()
        )
        if not older.step:
            raise _NothingInReachError(f"{given_up}, and no other is reachable; resume the run when it is back")

    def _hold(self, wanted: str) -> float:
        """Wait for nodes to become reachable again, and say so if nothing can be done without them."""
        self._show("starting", f"{self.reason}; waiting for {wanted}" if wanted else self.reason)
        return self._backoff.hold()

    def _end(self, run: str, state: RunState, reason: str, ordered: Command | None = None) -> None:
        """`ordered`: the command that asked for it, if one did."""
        paths = self._paths(run)
        with contextlib.suppress(InvalidInputError):  # the agent's own list has it all the same
            if paths is not None:
                restore.note_end(paths, state, reason, ordered)
        self._context.db.set_run_state(run, state, reason)
        self._show(state, reason)

    def _show(self, state: RunState, reason: str) -> None:
        """Publish the run's state to clients meanwhile."""
        if self._shown is not None and (self._shown.state, self._shown.reason) != (state, reason):
            self._shown = msgspec.structs.replace(self._shown, state=state, reason=reason)
            self._context.publisher.publish(self._shown)


def _look(paths: RunPaths, node: str) -> ResumePoint:
    limit_seconds = run_file.read(paths.run_file).group.unreachable_seconds
    source = checkpoint_source.find(paths, node, at_most=restore.rollback_step(paths))
    return ResumePoint(restore.kept_ranks(paths), source, limit_seconds)


def absent(way: ResumePoint, out_seconds: Mapping[str, float]) -> Absent:
    """Ranks that a run which goes back does without or waits for; `out_seconds`: how long each unreachable node
    has been, 0 for one that leaves. Where no node at all is reachable nothing can be done but wait."""
    ranks = {rank: node for rank, node in way.ranks.items() if node in out_seconds}
    if ranks and ranks.keys() == way.ranks.keys():
        return Absent(ranks, ", ".join(ranks.values()), "")
    if way.source.node not in ranks.values():
        return Absent(ranks, "", "")
    what, seconds = f"{way.source.node} (newest checkpoint)", out_seconds[way.source.node]
    if seconds < way.limit_seconds:
        return Absent(ranks, f"{what}, until it has been unreachable for {way.limit_seconds:.0f} s", "")
    return Absent(ranks, "", f"{what} has been unreachable for {seconds:.0f} s")


def _tell(session: Session, absent: Collection[int], given_up: str) -> None:
    session.conductor.leave_out(dict.fromkeys(absent, "was unreachable or leaving when the run went back"))
    if given_up:
        session.happened(Notice(given_up), "warning")


class Backoff:
    """Counts the times that a run goes back without getting further than before, and waits longer after each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[str, int] | None = None  # the run that went back last, and how far it had come
        self._tries = 0
        self._held_since: float | None = None

    def take(self, run: str, step: int) -> float | None:
        """Return the clock's time at which a run that has lost all its ranks at `step` is taken up; None if no more."""
        further = self._last is None or self._last[0] != run or step > self._last[1]
        self._tries = 0 if further else self._tries
        self._last = (run, step) if further else self._last
        return self.again()

    def again(self) -> float | None:
        """Return the next time for a run that was due and could not be taken up; None if it goes back no more."""
        self._held_since = None
        if self._last is None or self._tries >= STARTS:
            return None
        self._tries += 1
        return self._clock() + backoff_seconds(self._tries - 1)

    def hold(self) -> float:
        """Return the next time for a run that waits for unreachable nodes, which is no try."""
        self._held_since = self._clock() if self._held_since is None else self._held_since
        return self._clock() + MIN_BACKOFF_SECONDS

    @property
    def held_seconds(self) -> float:
        """Return how long it has waited for nodes."""
        return 0.0 if self._held_since is None else self._clock() - self._held_since

    def forget(self) -> None:
        """Something else begins, or the run continues elsewhere."""
        self._last, self._tries = None, 0
