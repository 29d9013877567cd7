"""A run all of whose ranks were lost: taken up from its newest checkpoint, with the nodes that are in reach by then."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import NamedTuple

import msgspec

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.restarts import LEAST_DELAY_SECONDS, STARTS, delay_seconds
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.checkpoint_source import Source
from trainctl.node_agent.runs.context import Equipment
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths

ABSENT_SECONDS = 10.0
"""How long a run that goes back waits for nodes that it can do without."""

Begin = Callable[[str, Collection[int]], Awaitable[Session | None]]
"""Take up a run without some of its ranks; None if it has ended at once. Raises InvalidInputError or RefusedError."""


class _NothingInReachError(Exception):
    """The text says what has been waited for, and what would help."""


class Way(NamedTuple):
    """Where a run goes back to."""

    ranks: dict[int, str]  # the nodes of its ranks
    source: Source
    limit_seconds: float  # for how long the node of the source may be out of reach


class Absent(NamedTuple):
    """Ranks whose nodes are out of reach."""

    ranks: dict[int, str]
    wanted: str  # which of these nodes it waits for, and until when; empty if it can do without them
    given_up: str  # which has the newest checkpoint and is waited for no more; empty if none


class GoingBack:
    """At most one run, from the loss of its last rank until it is conducted again or given up."""

    def __init__(self, equipment: Equipment, peers: Peers, begin: Begin) -> None:
        self._own, self._peers, self._begin = equipment, peers, begin
        self._way_back = WayBack()
        self._shown: m.RunView | None = None
        self._way: Way | None = None

    @property
    def run(self) -> str | None:
        """The run that waits."""
        return self._way_back.run

    @property
    def reason(self) -> str:
        """Of the last loss."""
        return self._way_back.reason

    def take(self, session: Session, reason: str) -> bool:
        """Have a run wait that has lost its last rank; False if it goes back no more."""
        if not self._way_back.take(session.run, session.conductor.progress.step, reason):
            return False
        self._own.ledger.set_run_state(session.run, "starting")
        self._shown, self._way = session.view, None
        return True

    def forget(self) -> str | None:
        """Something else begins, or another node conducts it; the run that waited, if one did."""
        return self._way_back.forget()

    def stop(self, run: str | None) -> bool:
        """Have the run that waits end instead; False if there is none, or not that one."""
        waiting = self.run
        if waiting is None or run not in (None, waiting):
            return False
        self._way_back.forget()
        self._end(waiting, "stopped", self.reason)
        return True

    def due(self) -> str | None:
        """The run whose time has come; it is handed out once."""
        return self._way_back.due()

    async def take_up(self, run: str, superseded: str) -> None:
        """Take up the run that was due, or have it wait for nodes; one that can't be taken up again and again has
        failed. `superseded`: why another node must be conducting it, empty if none is known to."""
        try:
            if superseded:
                self._hold(run, f"word of who conducts it: {superseded}")
                return
            absent, wanted, given_up = await self._absent(run)
            if wanted or (absent and self._way_back.held_seconds < ABSENT_SECONDS):
                self._hold(run, wanted)
                return
            if given_up:
                await self._check_older(run, absent, given_up)
            session = await self._begin(run, absent)
            if session is not None:
                _tell(session, absent, given_up)
        except _NothingInReachError as error:
            self._way_back.forget()
            self._end(run, "failed", f"{self.reason}; it cannot go back: {error}")
        except (InvalidInputError, RefusedError) as error:
            if not self._way_back.again():
                self._end(run, "failed", f"{self.reason}; it cannot go back: {error}")

    def _paths(self, run: str) -> RunPaths | None:
        known = next((row for row in self._own.ledger.runs() if row.run == run), None)
        return RunPaths(known.directory) if known is not None else None

    async def _absent(self, run: str) -> "Absent":
        paths, links = self._paths(run), self._peers.links
        if paths is None:
            return Absent({}, "", "")
        if self._way is None:  # reading a whole checkpoint takes time, and none is written meanwhile
            self._way = await asyncio.to_thread(_look, paths, self._own.node)
        out_seconds = {node: link.silent_seconds for node, link in links.items() if not link.line.open}
        return absent(self._way, out_seconds)

    async def _check_older(self, run: str, absent: Mapping[int, str], given_up: str) -> None:
        """Raises _NothingInReachError if no other checkpoint is in reach."""
        paths = self._paths(run)
        out = set(absent.values())
        older = (
            await asyncio.to_thread(checkpoint_source.find, paths, self._own.node, out)
            if paths is not None
            else Source()
        )
        if not older.step:
            raise _NothingInReachError(f"{given_up}, and no other is in reach; resume the run when it is back")

    def _hold(self, run: str, wanted: str) -> None:
        """Wait for nodes to come back into reach, and say so if nothing can be done without them."""
        self._way_back.hold(run)
        self._show("starting", f"{self.reason}; waiting for {wanted}" if wanted else self.reason)

    def _end(self, run: str, state: m.RunState, reason: str) -> None:
        self._own.ledger.set_run_state(run, state, reason)
        self._show(state, reason)

    def _show(self, state: m.RunState, reason: str) -> None:
        """What clients see of it meanwhile."""
        if self._shown is not None and (self._shown.state, self._shown.reason) != (state, reason):
            self._shown = msgspec.structs.replace(self._shown, state=state, reason=reason)
            self._own.publisher.publish(self._shown)


def _look(paths: RunPaths, node: str) -> Way:
    limit_seconds = run_file.read(paths.run_file).group.unreachable_seconds
    return Way(restore.kept_ranks(paths), checkpoint_source.find(paths, node), limit_seconds)


def absent(way: Way, out_seconds: Mapping[str, float]) -> Absent:
    """Whom a run that goes back has to do without, or to wait for; `out_seconds`: for how long each node that is out
    of reach has been. Where no node at all is in reach nothing can be done but wait."""
    ranks = {rank: node for rank, node in way.ranks.items() if node in out_seconds}
    if ranks and ranks.keys() == way.ranks.keys():
        return Absent(ranks, ", ".join(ranks.values()), "")
    if way.source.node not in ranks.values():
        return Absent(ranks, "", "")
    what, seconds = f"{way.source.node}, which has the newest checkpoint", out_seconds[way.source.node]
    if seconds < way.limit_seconds:
        return Absent(ranks, f"{what}, until it has been out of reach for {way.limit_seconds:.0f} s", "")
    return Absent(ranks, "", f"{what}, has been out of reach for {seconds:.0f} s")


def _tell(session: Session, absent: Collection[int], given_up: str) -> None:
    step = session.conductor.progress.step
    for rank in absent:
        session.conductor.ranks[rank].why = "was out of reach when the run went back"
    text = f"taken up again from step {step:,}: steps after it are made again"
    text += f"; {given_up}" if given_up else ""
    session.note(d.Happened("run", "warning", "auto", text, step))


class WayBack:
    """Counts the times that a run goes back without getting further than before, and waits longer after each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.run: str | None = None  # that waits to be taken up
        self._last: tuple[str, int] | None = None  # the run that went back last, and how far it had come
        self._tries, self._due = 0, 0.0
        self._held_since: float | None = None
        self.reason = ""  # of the last loss

    def take(self, run: str, step: int, reason: str) -> bool:
        """A run has lost all its ranks at `step`; False if it goes back no more."""
        further = self._last is None or self._last[0] != run or step > self._last[1]
        self._tries = 0 if further else self._tries
        self._last = (run, step) if further else self._last
        self.reason = reason
        return self._wait(run)

    def again(self) -> bool:
        """The run that was due could not be taken up; False if that is tried no more."""
        return self._last is not None and self._wait(self._last[0])

    def hold(self, run: str) -> None:
        """The run that was due waits for nodes that are out of reach, which is no try; look again in a second."""
        self._held_since = self._clock() if self._held_since is None else self._held_since
        self.run, self._due = run, self._clock() + LEAST_DELAY_SECONDS

    @property
    def held_seconds(self) -> float:
        """How long it has waited for nodes."""
        return 0.0 if self._held_since is None else self._clock() - self._held_since

    def _wait(self, run: str) -> bool:
        self._held_since = None
        if self._tries >= STARTS:
            self.run = None
            return False
        self._due = self._clock() + delay_seconds(self._tries)
        self._tries, self.run = self._tries + 1, run
        return True

    def due(self) -> str | None:
        """The run whose time has come; it is handed out once."""
        if self.run is None or self._clock() < self._due:
            return None
        run, self.run = self.run, None
        return run

    def forget(self) -> str | None:
        """An operator begins something else; the run that waited, if one did."""
        waited, self.run, self._last, self._tries = self.run, None, None, 0
        return waited
