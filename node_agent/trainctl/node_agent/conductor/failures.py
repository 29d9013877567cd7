"""Failures and endings: ranks that are gone, hung or fail a generation, how the group forms again without them, and how
a run ends: all ranks leave, then every open command gets its outcome; a stop waits for silent ranks."""

from collections.abc import Collection, Mapping
from math import inf

from trainctl.node_agent.conductor.background_writes import BackgroundWrites
from trainctl.node_agent.conductor.deadlines import HUNG_PART, Deadlines
from trainctl.node_agent.conductor.events import Ended, Kill, RankEnded, RankSilent, Tell
from trainctl.node_agent.conductor.group import Group
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.state import ConductorState, Final
from trainctl.protocol.messages import Leave, TrainerFailed
from trainctl.protocol.messages.events import RankChanged, RunStateChanged

STOP_SECONDS, STOP_TIMES = 30.0, 5.0
"""A stopping run ends as it is after this many seconds without progress, or this many times the expected time of the
plan in progress if that is longer."""


class RunEnding:
    """End of the run: all ranks leave, and then every open command gets its outcome."""

    def __init__(self, state: ConductorState) -> None:
        self._state = state
        self.has_halved = False  # the micro-batch of its last rank, which ran out of memory

    def dismiss_ranks(self, final: Final) -> None:
        """Nothing is under way any more, or nothing can continue."""
        state = self._state
        state.final = final
        state.enter("leaving")
        stopped = RunStateChanged("running", "stopped")
        state.end_all(state.pending.stopping, "applied", state.progress.step, made=stopped)
        for rank, at in state.ranks.items():
            if not at.ended:
                self.dismiss(rank)

    def give_up(self, ranks: Collection[int], seconds: float, *, owes_checkpoint: bool) -> None:
        """A stop ends without what `ranks` have not done in `seconds`; one that wanted a checkpoint has failed."""
        state, why = self._state, f"{self._state.nodes(ranks)} did not answer for {seconds:.0f} s"
        why += ", and no checkpoint was written" if owes_checkpoint else ""
        state.happen(RunStateChanged("", "stopped", why), "error" if owes_checkpoint else "warning")
        if owes_checkpoint:
            state.end_all(state.pending.stopping, "failed", state.progress.step, f"stopped, but {why}")
        self.dismiss_ranks("stopped")

    def dismiss(self, rank: int) -> None:
        """Have a rank leave."""
        leave = Leave(run=self._state.run, reason=self._state.reason or self._state.final or "")
        self._state.decide(Tell(rank, leave))

    def fail(self, reason: str) -> None:
        """The run ends where it is; what was accepted and not applied fails with it."""
        if self._state.stage == "leaving":
            return
        self._state.reason = reason
        self._state.happen(RunStateChanged("", "failed", reason), "error")
        self._end_open(f"the run failed: {reason}")
        self.dismiss_ranks("failed")

    def go_back(self, reason: str) -> None:
        """No one has the state: end, and resume from the newest checkpoint, unless it was stopping or had not begun.
        It has begun if a rank is beyond the first step, even if the record has lost that. One that has not begun tries
        again with a smaller micro-batch. What policies have sent ends, since they decide again; all else is carried
        out when the run has been resumed, or fails if it isn't."""
        state, durable = self._state, self._state.durable
        newest = max([state.progress.step, *(answer.last_step for answer in state.answers)])
        if durable.mode == "stopping" or (newest <= durable.first_step and not self.has_halved):
            self.fail(reason)
        elif state.stage != "leaving":
            state.reason = reason
            state.goes_back = True
            state.happen(RunStateChanged("", "going back", reason), "error")
            state.end_carried(state.progress.step)
            by = {command.id: command.by for command in state.pending.waiting}
            by |= {id: carried.by for id, carried in state.durable.carried.items()}
            for id in [id for id, sender in by.items() if sender.startswith("auto")]:
                state.end(id, "failed", state.progress.step, "the run goes back to a checkpoint")
            self.dismiss_ranks("failed")

    def roll_back(self, reason: str) -> None:
        """By a command: end, and resume from the checkpoint that was chosen."""
        self._state.reason = reason
        self._state.goes_back = True
        self._state.happen(RunStateChanged("running", "going back", reason), "warning")
        self._end_open("the run was rolled back before a step could apply it", but=("start-run",))
        self.dismiss_ranks("failed")

    def stop_instead(self, id: str) -> None:
        """The run was to go back, and an operator stops it: resumed later, it takes its newest checkpoint."""
        self._state.goes_back = False
        self._state.final = "stopped"
        if self._state.durable.rollback is not None:
            self._state.persist(rollback=None)
        self._state.end(id, "applied", self._state.progress.step, made=RunStateChanged("going back", "stopped"))
        self._end_open("the run was stopped before a step could apply it")

    def on_rank_ended(self, ended: RankEnded, *, has_halved: bool = False) -> None:
        """A rank left by order or by itself. Without a live one the run is to end; without a drained one it continues.
        `has_halved`: its micro-batch was, for it ran out of memory."""
        at = self._state.ranks.get(ended.rank)
        if at is None or at.ended:
            return
        at.ended = True
        at.why = ended.why
        self.has_halved = has_halved or self.has_halved
        if self._state.stage != "leaving":
            self._end_unasked(ended)

    def end_without_ranks(self) -> None:
        """After each event: a run that is to end is over once no rank is left, and at once if there is none."""
        state, final = self._state, self._state.final
        if final is None or not all(at.ended for at in state.ranks.values()):
            return
        state.enter("over")
        if not state.goes_back:
            self._end_open(f"the run {final} before a step could apply it")
        state.decide(Ended(final, state.reason))

    def _end_unasked(self, ended: RankEnded) -> None:
        state = self._state
        if state.settings.ranks[ended.rank].out:  # which may have been told to leave, and the others not
            state.happen(RankChanged((state.settings.label(ended.rank),), "ended", ended.why), "warning")
        elif ended.clean and state.adopts and state.is_ending:  # as our predecessor had ordered
            self.dismiss_ranks("finished" if state.progress.step >= state.config.run.steps else "stopped")
        else:
            self.go_back(f"rank {ended.rank} ({state.node(ended.rank)}) {ended.why}")

    def _end_open(self, why: str, *, but: Collection[str] = ()) -> None:
        """End all open commands with what they have come to, `but` for those of some verbs."""
        state = self._state
        state.end_carried(state.progress.step)
        state.end_all(state.pending.take(), "failed", state.progress.step, why)
        for id, carried in list(state.durable.carried.items()):
            if carried.verb not in but:
                state.end(id, "failed", state.progress.step, why)


class StopTimeout:
    """The time limit of a stop: it passes while nothing but a hung rank's heartbeats arrives."""

    def __init__(self, state: ConductorState, deadlines: Deadlines, writes: BackgroundWrites) -> None:
        self._state, self._deadlines, self._writes = state, deadlines, writes
        self._mark: object = None
        self._since = 0.0

    def look(self) -> None:
        """After an event of a stopping run: has anything moved?"""
        if self._state.durable.mode != "stopping":
            self._mark = None
            return
        first = self._deadlines.first
        said = (first.plan.seq, len(first.soon)) if first is not None else None
        mark = (self._state.stage, self._state.progress.step, self._deadlines.awaited, said, self._writes.mark)
        if mark != self._mark:
            self._mark, self._since = mark, self._state.now

    def lost_seconds(self) -> float:
        """Return the seconds that a stopping run has waited without progress; 0 while it makes some."""
        state = self._state
        waits_on = state.durable.mode != "stopping" or state.stage == "leaving" or self._deadlines.has_deadline
        expected_seconds = max(self._deadlines.expected_seconds, self._writes.expected_seconds)
        limit_seconds = max(STOP_SECONDS, STOP_TIMES * expected_seconds)
        return 0.0 if waits_on or state.now < self._since + limit_seconds else state.now - self._since


LAST_SECONDS = 60.0
"""Seconds the last rank with the state of the last step may be silent while its node is reachable, if there is a
checkpoint to go back to."""
LAST_TIMES = 5.0
"""Factor by which that rank may stall longer than any other."""
NO_CHECKPOINT = "; there is no checkpoint"


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
        self._stalled_parts: dict[int, float] = {}
        self._waiting: dict[int, tuple[float | None, str]] = {}  # for whom: since when it is silent, and until when

    def look(self) -> dict[int, str]:
        """Return why, of the ranks that have hung for so long that the others continue without them. Empty if no rank
        makes progress: then something shared, such as a disk, is the cause, and another process would hang as well."""
        late, self._stalled_parts = self._deadlines.late(), self._deadlines.stalls_as_parts()
        self.compiling = {rank for rank in late if self._deadlines.compiles(rank)}
        self.late = {rank: why for rank, why in late.items() if rank not in self.compiling}
        stalled = {rank: part for rank, part in self._stalled_parts.items() if part >= HUNG_PART}
        self.hung = {rank: self._no_progress(rank) for rank in stalled}
        hung = [rank for rank, part in stalled.items() if part >= 1.0]
        return {rank: self._why(rank) for rank in hung if self._restarts.can_spare(rank, without=stalled)}

    def _no_progress(self, rank: int) -> str:
        return f"no progress in {self._state.ranks[rank].doing or 'its part'}"

    def _why(self, rank: int) -> str:
        return f"hung, {self._no_progress(rank)} for {self._deadlines.stalls.seconds(rank):.0f} s"

    def give_up_stuck(self) -> None:
        """Give up the state of the last step if the only rank with it has hung for so long."""
        long = [rank for rank, part in self._stalled_parts.items() if part >= LAST_TIMES and self.is_last(rank)]
        if long and self.may_go_back:
            self._give_up_last(long[0], self._why(long[0]))

    def is_last(self, rank: int) -> bool:
        """Return whether no one else has the state of the last step."""
        return rank in self._state.live and not self._restarts.can_spare(rank)

    @property
    def may_go_back(self) -> bool:
        """Return whether there is a checkpoint; a run that is to stop ends by its own time limit."""
        return bool(self._state.durable.written) and self._state.durable.mode != "stopping"

    def _give_up_last(self, rank: int, why: str) -> None:
        """Go back to the newest checkpoint, as if that rank had died."""
        if self._state.stage != "leaving":
            self._ending.go_back(f"{self._state.settings.label(rank)}, the last rank with the run's state, {why}")
            self._state.decide(Kill(rank))

    def on_last_silent(self, silent: RankSilent) -> None:
        """The only rank with the state of the last step says nothing: wait for it, and say so, or give it up. Where
        there is no checkpoint to go back to, it is waited for without end."""
        state, rank, heard = self._state, silent.rank, self._state.ranks[silent.rank].heard
        is_cut_off, limit_seconds, until = silent.alone and not silent.in_touch, inf, ""
        if self.may_go_back and not state.lacking and not is_cut_off:
            limit_seconds = LAST_SECONDS if silent.in_touch else state.config.group.unreachable_seconds
            until = f"; after {limit_seconds:.0f} s the run goes back to the newest checkpoint"
        elif not state.durable.written:
            until = NO_CHECKPOINT
        elif is_cut_off:
            until = "; no other node is reachable"
        if silent.seconds >= limit_seconds:
            gone = f"has been unreachable for {silent.seconds:.0f} s ({silent.why})"
            self._give_up_last(rank, f"{silent.why} for {silent.seconds:.0f} s" if silent.in_touch else gone)
        elif self._waiting.get(rank) != (heard, until):
            self._waiting[rank] = heard, until
            text = f"{'silent' if silent.in_touch else 'unreachable'}: waiting for it{until}"
            state.happen(RankChanged((state.settings.label(rank),), "waited-for", text), "warning")

    def waited_for(self, rank: int) -> str:
        """Return what a hung rank is waited for in spite of that, and until when; empty if it will be replaced."""
        if not self.is_last(rank):
            return ""
        heard, until = self._waiting.get(rank, (None, ""))
        if heard != self._state.ranks[rank].heard or not until:
            until = "" if self._state.durable.written else NO_CHECKPOINT
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
        state, at, live = self._state, self._state.ranks.get(ended.rank), ended.rank in self._state.live
        if at is None or at.ended or state.stage == "leaving":
            self._ending.on_rank_ended(ended)
            return
        was_told = ended.clean and state.adopts and state.is_ending
        spared = live and not was_told and self._restarts.can_spare(ended.rank)
        lost = not live and state.settings.ranks[ended.rank].out in ("lost", "failed")
        if not (spared or lost or self._restarts.starts_again_in_first_load(ended.rank)):
            settings = state.settings
            if live:
                self._look_for_memory_death(ended)  # a run that goes back begins with it
            self._ending.on_rank_ended(ended, has_halved=state.settings is not settings)
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
        """One that hangs is killed, if its node can be reached, and comes back as another process. Before the run has
        begun there is no beginning without one whose node is gone."""
        state, rank, live = self._state, silent.rank, silent.rank in self._state.live
        said = f"has been silent for {silent.seconds:.0f} s"
        if state.stage == "leaving":
            return
        if live and self._restarts.can_spare(rank):
            doing = state.ranks[rank].doing
            heard = f", last seen in {doing}" if doing and " of step " not in silent.why else ""
            self._replace(rank, silent.why + heard)
        elif self._restarts.loads_first(rank):
            if silent.in_touch and silent.seconds >= state.config.run.load_seconds:
                self._restarts.end_hung(rank, said)
            elif not silent.in_touch and silent.seconds >= state.config.group.unreachable_seconds:
                self._ending.go_back(f"{state.settings.label(rank)} {said} and has not loaded; {silent.why}")
        elif live and silent.seconds:  # not just late with an answer
            self.hangs.on_last_silent(silent)
        elif silent.in_touch and self._restarts.is_loading(rank):
            self._restarts.end_hung(rank, said)

    def _replace(self, rank: int, why: str) -> None:
        self._group.without(rank, why)
        self._state.decide(Kill(rank))

    def look_for_hung(self) -> None:
        """Replace ranks that are heard from and make no progress, one after another: each leaves others to do more."""
        if self._state.stage == "leaving":
            return
        hung = self.hangs.look()
        if hung:
            self._replace(*next(iter(hung.items())))
        else:
            self.hangs.give_up_stuck()
        stalls = self._deadlines.stalls
        for rank in self._state.ranks:
            if self._restarts.is_loading(rank) and stalls.seconds(rank) >= stalls.load_limit_seconds():
                self._restarts.end_hung(rank, "has made no progress for too long")
                stalls.forget(rank)
