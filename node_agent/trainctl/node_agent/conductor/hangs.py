"""Ranks that hang while their heartbeats arrive: which are replaced, and when the run goes back to a checkpoint."""

from math import inf
from typing import NamedTuple

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.deadlines import HUNG_PART, Deadlines
from trainctl.node_agent.conductor.rendezvous import Rendezvous
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.shutdown import Shutdown
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.protocol.messages import events as e

LAST_SECONDS = 60.0
"""Seconds the last rank with the state of the last step may be silent while its node is reachable, if there is a
checkpoint to go back to."""
LAST_TIMES = 5.0
"""Factor by which that rank may stall longer than any other."""


class Hung(NamedTuple):
    """A rank that is to be replaced."""

    rank: int
    why: str


class Hangs:
    """Looks at each tick; only the conductor replaces."""

    def __init__(
        self, state: ConductorState, rendezvous: Rendezvous, deadlines: Deadlines, restarts: Restarts,
        shutdown: Shutdown,
    ) -> None:  # fmt: skip
        self._state, self._rendezvous, self._deadlines = state, rendezvous, deadlines
        self._restarts, self._shutdown = restarts, shutdown
        self.late: dict[int, str] = {}
        """Why, of each rank that takes much longer over its part than is usual."""
        self.compiling: set[int] = set()
        """Ranks that take long over a first step, because they compile the model in it."""
        self.hung: dict[int, str] = {}
        """Why, of each rank that is heard from and has made no progress for long."""
        self._still: dict[int, float] = {}
        self._waiting: dict[int, tuple[float | None, str]] = {}  # for whom: since when it is silent, and until when

    def look(self, now: float) -> list[Hung]:
        """Ranks that have hung for so long that the others continue without them. None if no rank makes progress: then
        something shared, such as a disk, is the cause, and another process would hang as well."""
        late, self._still = self._deadlines.late(now), self._deadlines.still(now)
        self.compiling = {rank for rank in late if self._deadlines.compiles(rank)}
        self.late = {rank: why for rank, why in late.items() if rank not in self.compiling}
        still = {rank: part for rank, part in self._still.items() if part >= HUNG_PART}
        self.hung = {rank: f"no progress in {self._doing(rank)}" for rank in still}
        return [
            Hung(rank, f"hung, {self._why(rank)}")
            for rank, part in still.items() if part >= 1.0 and self._restarts.can_spare(rank, without=still)
        ]  # fmt: skip

    def _why(self, rank: int) -> str:
        return f"no progress in {self._doing(rank)} for {self._deadlines.stalls.seconds(rank):.0f} s"

    def _doing(self, rank: int) -> str:
        return self._rendezvous.ranks[rank].doing or "its part"

    def last(self) -> Hung | None:
        """The only rank with the state of the last step, if it has hung for so long that this state is given up."""
        long = [rank for rank, part in self._still.items() if part >= LAST_TIMES and self.is_last(rank)]
        return Hung(long[0], f"hung, {self._why(long[0])}") if long and self.may_go_back else None

    def is_last(self, rank: int) -> bool:
        """Whether no one else has the state of the last step."""
        return rank in self._rendezvous.live and not self._restarts.can_spare(rank)

    @property
    def may_go_back(self) -> bool:
        """Whether there is a checkpoint; a run that is to stop ends by its own time limit."""
        return bool(self._state.durable.written) and self._state.durable.mode != "stopping"

    def give_up_last(self, hung: Hung) -> None:
        """Go back to the newest checkpoint, as if that rank had died."""
        if self._state.stage != "leaving":
            label = self._state.settings.label(hung.rank)
            self._shutdown.go_back(f"{label}, the last rank with the run's state, {hung.why}")
            self._state.decide(d.Kill(hung.rank))

    def on_last_silent(self, silent: d.RankSilent) -> None:
        """The only rank with the state of the last step says nothing: wait for it, and say so, or give it up."""
        where = "silent" if silent.in_touch else "unreachable"
        limit_seconds, rank, heard = self._limit_seconds(silent), silent.rank, self._rendezvous.ranks[silent.rank].heard
        if silent.seconds >= limit_seconds:
            why = f"{silent.why} for {silent.seconds:.0f} s"
            if not silent.in_touch:
                why = f"has been unreachable for {silent.seconds:.0f} s ({silent.why})"
            self.give_up_last(Hung(rank, why))
            return
        until = self._until(silent, limit_seconds)
        known, self._waiting[rank] = self._waiting.get(rank), (heard, until)
        if known != self._waiting[rank]:
            text = f"{where}: waiting for it{until}"
            self._state.happen(e.RankChanged((self._state.settings.label(rank),), "waited-for", text), "warning")

    def _limit_seconds(self, silent: d.RankSilent) -> float:
        """Where nothing is to be had instead it is waited for without end."""
        if not self.may_go_back or self._state.lacking or (silent.alone and not silent.in_touch):
            return inf
        return LAST_SECONDS if silent.in_touch else self._state.config.group.unreachable_seconds

    def _until(self, silent: d.RankSilent, limit_seconds: float) -> str:
        if limit_seconds < inf:
            return f"; after {limit_seconds:.0f} s the run goes back to the newest checkpoint"
        if not self._state.durable.written:
            return "; there is no checkpoint"
        return "; no other node is reachable" if silent.alone and not silent.in_touch else ""

    def waited_for(self, rank: int) -> str:
        """What a hung rank is waited for in spite of that, and until when; empty if it will be replaced."""
        if not self.is_last(rank):
            return ""
        heard, until = self._waiting.get(rank, (None, ""))
        if heard != self._rendezvous.ranks[rank].heard or not until:
            until = "" if self._state.durable.written else "; there is no checkpoint"
        return f"; no other rank has the run's state{until}"
