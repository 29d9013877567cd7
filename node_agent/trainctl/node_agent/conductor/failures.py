"""Failures of ranks that end, fall silent or hang: the run continues without them, waits for them, or ends."""

from collections.abc import Mapping

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.deadlines import Deadlines
from trainctl.node_agent.conductor.hangs import Hangs, Hung
from trainctl.node_agent.conductor.regroup import Regroup
from trainctl.node_agent.conductor.rendezvous import Rendezvous
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.shutdown import Shutdown
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.protocol import messages as m


class Failures:
    """The conductor reports here what ranks and their nodes say, or don't."""

    def __init__(
        self, state: ConductorState, rendezvous: Rendezvous, deadlines: Deadlines, restarts: Restarts,
        hangs: Hangs, shutdown: Shutdown, regroup: Regroup,
    ) -> None:  # fmt: skip
        self._state, self._rendezvous, self._deadlines, self._restarts = state, rendezvous, deadlines, restarts
        self._hangs, self._shutdown, self._regroup = hangs, shutdown, regroup

    def on_trainer_failed(self, failed: m.TrainerFailed, now: float) -> None:
        """A rank that is out is heard from again when its process has ended."""
        if failed.rank not in self._rendezvous.live or self._state.stage == "leaving":
            return
        if self._restarts.can_spare(failed.rank):
            self._regroup.without(failed.rank, f"says: {failed.reason}", now)
        else:
            self._shutdown.fail(f"rank {failed.rank} ({self._state.node(failed.rank)}): {failed.reason}")

    def refuse(self, refused: Mapping[int, str], now: float) -> None:
        """Ranks that are new and hold another model than the others, each with the reason: given up until they are
        admitted, which starts them again."""
        for rank, why in refused.items():
            for id, carried in list(self._state.durable.carried.items()):
                if carried.verb == "admit" and carried.node == self._state.node(rank):
                    self._state.end(id, "failed", reason=why)
            self._regroup.without(rank, why, now, out="failed")
            self._state.decide(d.Kill(rank))

    def on_ended(self, ended: d.RankEnded, now: float) -> None:
        """The others continue where one of them has the state of the last step."""
        at, live = self._rendezvous.ranks.get(ended.rank), ended.rank in self._rendezvous.live
        ends = self._state.durable.mode == "stopping" or self._state.progress.step >= self._state.config.run.steps
        was_told = ended.clean and self._rendezvous.adopts and ends
        spared = live and not was_told and self._restarts.can_spare(ended.rank)
        lost = not live and at is not None and self._state.settings.ranks[ended.rank].out in ("lost", "failed")
        again = self._restarts.starts_again_in_first_load(ended.rank)
        if at is None or at.ended or self._state.stage == "leaving" or not (spared or lost or again):
            settings = self._state.settings
            if live and at is not None and not at.ended and self._state.stage != "leaving":
                self._look_for_memory_death(ended)  # a run that goes back begins with it
            self._shutdown.on_rank_ended(ended, has_halved=self._state.settings is not settings)
            return
        self._look_for_memory_death(ended)
        if spared:
            at.ended = True
            self._regroup.without(ended.rank, ended.why, now)
        self._restarts.ended(ended.rank, ended.why, now)

    def _look_for_memory_death(self, ended: d.RankEnded) -> None:
        """Of one that had loaded: what loading takes, no micro-batch changes."""
        rank = ended.rank
        loads = self._state.stage == "loading" or self._restarts.is_starting(rank)
        if ended.memory and not (loads and self._rendezvous.ranks[rank].ready is None):
            self._restarts.ran_out_of_memory(rank, ended.memory)

    def on_silent(self, silent: d.RankSilent, now: float) -> None:
        """One that hangs is killed, if its node can be reached, and comes back as another process."""
        rank, live = silent.rank, silent.rank in self._rendezvous.live
        if self._state.stage == "leaving":
            return
        if live and self._restarts.can_spare(rank):
            doing = self._rendezvous.ranks[rank].doing
            heard = f", last seen in {doing}" if doing and " of step " not in silent.why else ""
            self._replace(Hung(rank, silent.why + heard), now)
        elif self._restarts.loads_first(rank):
            self._on_silent_in_first_load(silent, now)
        elif live and silent.seconds:  # not just late with an answer
            self._hangs.on_last_silent(silent)
        elif silent.in_touch and self._restarts.is_loading(rank):
            self._restarts.end_hung(rank, f"has been silent for {silent.seconds:.0f} s", now)

    def _on_silent_in_first_load(self, silent: d.RankSilent, now: float) -> None:
        """No one has begun: one that hangs is started again, without one whose node is gone there is no beginning."""
        rank, said = silent.rank, f"has been silent for {silent.seconds:.0f} s"
        if silent.in_touch and silent.seconds >= self._state.config.run.load_seconds:
            self._restarts.end_hung(rank, said, now)
        elif not silent.in_touch and silent.seconds >= self._state.config.group.unreachable_seconds:
            label = self._state.settings.label(rank)
            self._shutdown.go_back(f"{label} {said} and has not loaded; {silent.why}")

    def _replace(self, hung: Hung, now: float) -> None:
        self._regroup.without(hung.rank, hung.why, now)
        self._state.decide(d.Kill(hung.rank))

    def look_for_hung(self, now: float) -> None:
        """Those that are heard from and make no progress; one after another, for each leaves others to do more."""
        if self._state.stage == "leaving":
            return
        hung, last = self._hangs.look(now), self._hangs.last()
        if hung:
            self._replace(hung[0], now)
        elif last is not None:
            self._hangs.give_up_last(last)
        for rank in self._rendezvous.ranks:
            if self._restarts.is_loading(rank) and self._deadlines.stuck_in_loading(rank):
                self._restarts.end_hung(rank, "has made no progress for too long", now)
                self._deadlines.stalls.forget(rank)
