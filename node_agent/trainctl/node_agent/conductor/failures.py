"""Failures: ranks that are gone, hung or fail a generation, and how the group forms again without them."""

import dataclasses
from collections.abc import Mapping
from math import inf

from trainctl.node_agent.conductor.deadlines import HUNG_PART, Deadlines
from trainctl.node_agent.conductor.endings import RunEnding
from trainctl.node_agent.conductor.events import Kill, RankEnded, RankSilent
from trainctl.node_agent.conductor.group import Group
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.protocol.messages import TrainerFailed
from trainctl.protocol.messages.events import RankChanged

LAST_SECONDS = 60.0
"""Seconds the last rank with the state of the last step may be silent while its node is reachable, if there is a
checkpoint to go back to."""
LAST_TIMES = 5.0
"""Factor by which that rank may stall longer than any other."""


@dataclasses.dataclass(frozen=True)
class Hung:
    """A rank that is to be replaced."""

    rank: int
    why: str


class Hangs:
    """Ranks that hang while their heartbeats arrive: which are replaced, and when the run goes back to a checkpoint."""

    def __init__(self, state: ConductorState, deadlines: Deadlines, restarts: Restarts, ending: RunEnding) -> None:
        self._state, self._deadlines, self._restarts, self._ending = state, deadlines, restarts, ending
        self.late: dict[int, str] = {}
        """Why, of each rank that takes much longer over its part than is usual."""
        self.compiling: set[int] = set()
        """Ranks that take long over a first step, because they compile the model in it."""
        self.hung: dict[int, str] = {}
        """Why, of each rank that is heard from and has made no progress for long."""
        self._still: dict[int, float] = {}
        self._waiting: dict[int, tuple[float | None, str]] = {}  # for whom: since when it is silent, and until when

    def look(self) -> list[Hung]:
        """Ranks that have hung for so long that the others continue without them. None if no rank makes progress: then
        something shared, such as a disk, is the cause, and another process would hang as well."""
        late, self._still = self._deadlines.late(), self._deadlines.still()
        self.compiling = {rank for rank in late if self._deadlines.compiles(rank)}
        self.late = {rank: why for rank, why in late.items() if rank not in self.compiling}
        still = {rank: part for rank, part in self._still.items() if part >= HUNG_PART}
        self.hung = {rank: f"no progress in {self._doing(rank)}" for rank in still}
        hung = [rank for rank, part in still.items() if part >= 1.0]
        spared = [rank for rank in hung if self._restarts.can_spare(rank, without=still)]
        return [Hung(rank, f"hung, {self._why(rank)}") for rank in spared]

    def _why(self, rank: int) -> str:
        return f"no progress in {self._doing(rank)} for {self._deadlines.stalls.seconds(rank):.0f} s"

    def _doing(self, rank: int) -> str:
        return self._state.ranks[rank].doing or "its part"

    def last(self) -> Hung | None:
        """The only rank with the state of the last step, if it has hung for so long that this state is given up."""
        long = [rank for rank, part in self._still.items() if part >= LAST_TIMES and self.is_last(rank)]
        return Hung(long[0], f"hung, {self._why(long[0])}") if long and self.may_go_back else None

    def is_last(self, rank: int) -> bool:
        """Return whether no one else has the state of the last step."""
        return rank in self._state.live and not self._restarts.can_spare(rank)

    @property
    def may_go_back(self) -> bool:
        """Return whether there is a checkpoint; a run that is to stop ends by its own time limit."""
        return bool(self._state.durable.written) and self._state.durable.mode != "stopping"

    def give_up_last(self, hung: Hung) -> None:
        """Go back to the newest checkpoint, as if that rank had died."""
        if self._state.stage != "leaving":
            label = self._state.settings.label(hung.rank)
            self._ending.go_back(f"{label}, the last rank with the run's state, {hung.why}")
            self._state.decide(Kill(hung.rank))

    def on_last_silent(self, silent: RankSilent) -> None:
        """The only rank with the state of the last step says nothing: wait for it, and say so, or give it up."""
        where = "silent" if silent.in_touch else "unreachable"
        limit_seconds, rank, heard = self._limit_seconds(silent), silent.rank, self._state.ranks[silent.rank].heard
        if silent.seconds >= limit_seconds:
            why = f"{silent.why} for {silent.seconds:.0f} s"
            if not silent.in_touch:
                why = f"has been unreachable for {silent.seconds:.0f} s ({silent.why})"
            self.give_up_last(Hung(rank, why))
            return
        until = self._until(silent, limit_seconds)
        if self._waiting.get(rank) != (heard, until):
            self._waiting[rank] = heard, until
            text = f"{where}: waiting for it{until}"
            self._state.happen(RankChanged((self._state.settings.label(rank),), "waited-for", text), "warning")

    def _limit_seconds(self, silent: RankSilent) -> float:
        """Where nothing is to be had instead it is waited for without end."""
        if not self.may_go_back or self._state.lacking or (silent.alone and not silent.in_touch):
            return inf
        return LAST_SECONDS if silent.in_touch else self._state.config.group.unreachable_seconds

    def _until(self, silent: RankSilent, limit_seconds: float) -> str:
        if limit_seconds < inf:
            return f"; after {limit_seconds:.0f} s the run goes back to the newest checkpoint"
        if not self._state.durable.written:
            return "; there is no checkpoint"
        return "; no other node is reachable" if silent.alone and not silent.in_touch else ""

    def waited_for(self, rank: int) -> str:
        """Return what a hung rank is waited for in spite of that, and until when; empty if it will be replaced."""
        if not self.is_last(rank):
            return ""
        heard, until = self._waiting.get(rank, (None, ""))
        if heard != self._state.ranks[rank].heard or not until:
            until = "" if self._state.durable.written else "; there is no checkpoint"
        return f"; no other rank has the run's state{until}"


class Failures:
    """The conductor reports here what ranks and their nodes say, or don't."""

    def __init__(
        self, state: ConductorState, deadlines: Deadlines, restarts: Restarts, ending: RunEnding, group: Group
    ) -> None:
        self._state, self._deadlines, self._restarts = state, deadlines, restarts
        self._ending, self._group = ending, group
        self.hangs = Hangs(state, deadlines, restarts, ending)

    def on_trainer_failed(self, failed: TrainerFailed) -> None:
        """A rank that is out is heard from again when its process has ended."""
        if failed.rank not in self._state.live or self._state.stage == "leaving":
            return
        if self._restarts.can_spare(failed.rank):
            self._group.without(failed.rank, f"says: {failed.reason}")
        else:
            self._ending.fail(f"rank {failed.rank} ({self._state.node(failed.rank)}): {failed.reason}")

    def refuse(self, refused: Mapping[int, str]) -> None:
        """Ranks that are new and hold another model than the others, each with the reason: given up until they are
        admitted, which starts them again."""
        for rank, why in refused.items():
            for id, carried in list(self._state.durable.carried.items()):
                if carried.verb == "admit" and carried.node == self._state.node(rank):
                    self._state.end(id, "failed", reason=why)
            self._group.without(rank, why, out="failed")
            self._state.decide(Kill(rank))

    def on_ended(self, ended: RankEnded) -> None:
        """The others continue where one of them has the state of the last step."""
        at, live = self._state.ranks.get(ended.rank), ended.rank in self._state.live
        ends = self._state.durable.mode == "stopping" or self._state.progress.step >= self._state.config.run.steps
        was_told = ended.clean and self._state.adopts and ends
        spared = live and not was_told and self._restarts.can_spare(ended.rank)
        lost = not live and at is not None and self._state.settings.ranks[ended.rank].out in ("lost", "failed")
        again = self._restarts.starts_again_in_first_load(ended.rank)
        if at is None or at.ended or self._state.stage == "leaving" or not (spared or lost or again):
            settings = self._state.settings
            if live and at is not None and not at.ended and self._state.stage != "leaving":
                self._look_for_memory_death(ended)  # a run that goes back begins with it
            self._ending.on_rank_ended(ended, has_halved=self._state.settings is not settings)
            return
        self._look_for_memory_death(ended)
        if spared:
            at.ended = True
            self._group.without(ended.rank, ended.why)
        self._restarts.ended(ended.rank, ended.why)

    def _look_for_memory_death(self, ended: RankEnded) -> None:
        """Look only at one that had loaded: what loading takes, no micro-batch changes."""
        rank = ended.rank
        loads = self._state.stage == "loading" or self._restarts.is_starting(rank)
        if ended.memory and not (loads and self._state.ranks[rank].ready is None):
            self._restarts.ran_out_of_memory(rank, ended.memory)

    def on_silent(self, silent: RankSilent) -> None:
        """One that hangs is killed, if its node can be reached, and comes back as another process."""
        rank, live = silent.rank, silent.rank in self._state.live
        if self._state.stage == "leaving":
            return
        if live and self._restarts.can_spare(rank):
            doing = self._state.ranks[rank].doing
            heard = f", last seen in {doing}" if doing and " of step " not in silent.why else ""
            self._replace(Hung(rank, silent.why + heard))
        elif self._restarts.loads_first(rank):
            self._on_silent_in_first_load(silent)
        elif live and silent.seconds:  # not just late with an answer
            self.hangs.on_last_silent(silent)
        elif silent.in_touch and self._restarts.is_loading(rank):
            self._restarts.end_hung(rank, f"has been silent for {silent.seconds:.0f} s")

    def _on_silent_in_first_load(self, silent: RankSilent) -> None:
        """No one has begun: one that hangs is started again, without one whose node is gone there is no beginning."""
        rank, said = silent.rank, f"has been silent for {silent.seconds:.0f} s"
        if silent.in_touch and silent.seconds >= self._state.config.run.load_seconds:
            self._restarts.end_hung(rank, said)
        elif not silent.in_touch and silent.seconds >= self._state.config.group.unreachable_seconds:
            label = self._state.settings.label(rank)
            self._ending.go_back(f"{label} {said} and has not loaded; {silent.why}")

    def _replace(self, hung: Hung) -> None:
        self._group.without(hung.rank, hung.why)
        self._state.decide(Kill(hung.rank))

    def look_for_hung(self) -> None:
        """Those that are heard from and make no progress; one after another, for each leaves others to do more."""
        if self._state.stage == "leaving":
            return
        hung, last = self.hangs.look(), self.hangs.last()
        if hung:
            self._replace(hung[0])
        elif last is not None:
            self.hangs.give_up_last(last)
        for rank in self._state.ranks:
            if self._restarts.is_loading(rank) and self._deadlines.stuck_in_loading(rank):
                self._restarts.end_hung(rank, "has made no progress for too long")
                self._deadlines.stalls.forget(rank)
