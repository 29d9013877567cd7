"""Shutdown of a run: all ranks leave, then every open command gets its outcome; a stop waits for silent ranks."""

from collections.abc import Collection

from trainctl.node_agent.conductor.background_writes import BackgroundWrites
from trainctl.node_agent.conductor.deadlines import Deadlines
from trainctl.node_agent.conductor.events import Ended, RankEnded, Tell
from trainctl.node_agent.conductor.state import ConductorState, Final
from trainctl.protocol.messages import Leave
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
