"""Regrouping from one generation to the next: the old one is left and a new one forms with the ranks present."""

from typing import Literal

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.pipeline import Pipeline
from trainctl.node_agent.conductor.rendezvous import Rendezvous
from trainctl.node_agent.conductor.restarts import Restarts
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.protocol import messages as m


class Regroup:
    """The conductor reports here what ends a generation; the next one continues its work."""

    def __init__(self, state: ConductorState, rendezvous: Rendezvous, pipeline: Pipeline, restarts: Restarts) -> None:
        self._state, self._rendezvous, self._pipeline, self._restarts = state, rendezvous, pipeline, restarts

    def begin(self, now: float) -> None:
        """All live ranks have loaded. Raises CannotGoOnError."""
        self._pipeline.abandon()
        self._rendezvous.begin(now)

    def on_fenced(self, fenced: m.Fenced, now: float) -> None:
        """A rank has left the generation. Raises CannotGoOnError."""
        if self._rendezvous.on_fenced(fenced):
            self._recover(now)

    def _recover(self, now: float) -> None:
        self._rendezvous.form(self._pipeline.recover(self._rendezvous.answers()), now)

    def on_group_failed(self, failed: m.GroupFailed, now: float) -> None:
        """A sum failed, or a group could not be joined. Raises CannotGoOnError if that happens again and again."""
        is_current = failed.generation == self._state.durable.generation
        concerns = self._state.stage in ("offering", "forming", "formed") and is_current
        if concerns and failed.rank in self._rendezvous.live:
            self.leave(f"{self._state.settings.label(failed.rank)}: {failed.reason}", now)

    def leave(self, why: str, now: float) -> None:
        """In a group that fails for the second time, the rank that was to be given the state may be the cause."""
        self._pipeline.abandon()
        for rank in self._rendezvous.newcomers if self._rendezvous.failures else ():
            if self._restarts.can_spare(rank):
                self._restarts.lose(rank, f"could not join: {why}")
                self._state.decide(d.Kill(rank))
        self._rendezvous.fail(why, now)

    def without(self, rank: int, why: str, now: float, out: Literal["lost", "failed"] = "lost") -> None:
        """Go on without a rank: nothing of this generation counts any more."""
        self._restarts.lose(rank, why, out)
        self._pipeline.deadlines.stalls.forget(rank)
        match self._state.stage:
            case "loading":
                if self._rendezvous.all_loaded:
                    self.begin(now)
            case "fencing":
                if self._rendezvous.all_fenced:
                    self._recover(now)
            case "offering" | "forming" | "formed" | "leaving" | "over":
                self.form_again(now)

    def form_again(self, now: float) -> None:
        """Have everybody leave this generation, for another one."""
        self._pipeline.abandon()
        self._rendezvous.fence(now)
