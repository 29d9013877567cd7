"""Profiles of a run's steps, as groups: what ranks recorded by one command. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e


@dataclass(frozen=True)
class StepProfile:
    """The ranks' profiles by one command."""

    command: str
    ranks: tuple[e.Profiled, ...] = ()  # by rank
    failed: tuple[e.ProfileFailed, ...] = ()  # of the others that were asked

    @property
    def first_step(self) -> int:
        """Of any rank; 0 if none has recorded a step."""
        return min((rank.first_step for rank in self.ranks), default=0)

    @property
    def last_step(self) -> int:
        """Of any rank: one may have ended early."""
        return max((rank.last_step for rank in self.ranks), default=0)

    @property
    def phases(self) -> tuple[str, ...]:
        """The phases that a rank has, in their order."""
        found = {phase.name for rank in self.ranks for phase in rank.phases}
        return tuple(name for name in m.PHASES if name in found)

    def label(self, rank: e.Profiled) -> str:
        """A node, or node:rank where a node has several."""
        alone = sum(other.node == rank.node for other in self.ranks) == 1
        return rank.node if alone else f"{rank.node}:{rank.rank}"


def groups(events: Iterable[m.Event]) -> tuple[StepProfile, ...]:
    """A group for each command, oldest first: steps may repeat after a rollback."""
    found: dict[str, list[e.AnyEvent]] = {}
    for event in sorted(events, key=lambda event: event.id):
        found.setdefault(event.command or "", []).append(event.data)
    return tuple(_group(command, outcomes) for command, outcomes in found.items())


def _group(command: str, outcomes: Sequence[e.AnyEvent]) -> StepProfile:
    ranks = [one for one in outcomes if isinstance(one, e.Profiled)]
    failed = tuple(one for one in outcomes if isinstance(one, e.ProfileFailed))
    return StepProfile(command, tuple(sorted(ranks, key=lambda one: one.rank)), failed)


def count(rank: e.Profiled) -> int:
    """The number of steps that a rank recorded."""
    return rank.last_step - rank.first_step + 1


def phase_of(rank: e.Profiled, name: str) -> m.PhaseProfile | None:
    """A rank's phase of that name."""
    return next((phase for phase in rank.phases if phase.name == name), None)
