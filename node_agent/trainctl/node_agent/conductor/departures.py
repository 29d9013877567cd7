"""Departures: ranks whose nodes shut down leave the group at one boundary, and rejoin when their nodes are back.

The samples of a departing rank go to the others, which all hold the state of the last step. Its trainer is ended only
once they have formed a group without it. The rank then counts as lost, but no trainer is started before its node is
back. A rank outside the group holds nothing: its trainer is ended at once, also if a person had drained it.
"""

from collections.abc import Mapping

import msgspec

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.rendezvous import Rendezvous
from trainctl.node_agent.conductor.state import ConductorState
from trainctl.node_agent.planning import share_edits
from trainctl.protocol import messages as m

REPEAT_SECONDS = 2.0
"""Seconds after which a rank that has not left is asked again."""


class Departures:
    """The ranks that are to leave, and those that have left until their nodes are back."""

    def __init__(self, state: ConductorState, rendezvous: Rendezvous) -> None:
        self._state, self._rendezvous = state, rendezvous
        self._wanted: Mapping[int, str] = {}  # why, by rank
        self._asked: dict[int, float] = {}  # when a departed rank was last asked to leave

    def want(self, wanted: Mapping[int, str]) -> None:
        """Have these ranks leave at the next boundary, each for a reason, and no others."""
        self._wanted = wanted
        self._asked = {rank: at for rank, at in self._asked.items() if rank in {*wanted, *self._state.durable.departed}}

    @property
    def due(self) -> dict[int, str]:
        """The ranks that leave at the next boundary, with the reasons; none if no other rank has the last state."""
        if not self._wanted:
            return {}
        live = self._state.settings.live
        due = {rank: why for rank, why in self._wanted.items() if rank in live}
        standing = self._rendezvous.members or live.keys()
        stays = any(not self._rendezvous.ranks[rank].ended for rank in live.keys() & standing - due.keys())
        return due if stays else {}

    def apply(self, step: int) -> None:
        """All that are due leave the group before `step`."""
        for rank, why in self.due.items():
            made = share_edits.lose(self._state.settings, rank)
            self._state.keep(settings=made.settings, departed=(*self._state.durable.departed, rank))
            self._rendezvous.ranks[rank].forget()
            self._rendezvous.ranks[rank].why = why
            change = msgspec.structs.replace(made.change, cause=why, node=self._state.node(rank))
            self._state.happen(change, "warning", step, verb="drain")

    def release(self, now: float) -> None:
        """End the trainers of ranks that have left, once the others have a group without them, or are paused; at once
        those of other ranks outside the group."""
        if self._state.stage in ("leaving", "over"):
            return
        self._note_lost()
        if self._state.stage == "loading":
            return
        for rank in self._released:
            at, asked = self._rendezvous.ranks[rank], self._asked.get(rank)
            if not at.ended and (asked is None or now >= asked + REPEAT_SECONDS):
                self._asked[rank] = now
                why = self._wanted.get(rank) or at.why or "its node left"
                self._state.decide(d.Tell(rank, m.Leave(run=self._state.run, reason=why)))

    def _note_lost(self) -> None:
        """Lost ranks of leaving nodes: they don't rejoin, and none is started, before their nodes are back."""
        ranks, departed = self._state.settings.ranks, self._state.durable.departed
        lost = [rank for rank in sorted(self._wanted) if ranks[rank].out == "lost" and rank not in departed]
        if lost:
            self._state.persist(departed=(*departed, *lost))

    @property
    def _released(self) -> list[int]:
        """The ranks whose trainers hold nothing that the group needs, ascending."""
        group = self._state.settings.live.keys() | self._rendezvous.members
        outside = {rank for rank in self._wanted if rank not in group}
        has_group = self._rendezvous.is_current or self._state.durable.mode == "paused"
        return sorted(
            outside.union(self._state.durable.departed if self._state.stage == "formed" and has_group else ())
        )

    def come_back(self, rank: int) -> bool:
        """Its node is there again; True if it had left."""
        departed = self._state.durable.departed
        if rank not in departed:
            return False
        self._asked.pop(rank, None)
        self._state.persist(departed=tuple(other for other in departed if other != rank))
        return True
