"""Profiles of a run's steps, as groups: what ranks recorded of the same steps. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e


@dataclass(frozen=True)
class StepProfile:
    """The ranks' profiles of the same steps."""

    first_step: int
    last_step: int
    ranks: tuple[e.Profiled, ...]  # by rank
    failed: tuple[e.ProfileFailed, ...] = ()  # of ranks that recorded none of these steps

    @property
    def steps(self) -> int:
        return self.last_step - self.first_step + 1

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
    """Oldest first. A failure belongs to the group that is recorded next to it: the ranks of a profile end together."""
    found: dict[tuple[int, int], dict[int, e.Profiled]] = {}
    last_ids: dict[tuple[int, int], int] = {}
    failures: list[m.Event] = []
    for event in events:
        if isinstance(event.data, e.Profiled):
            key = (event.data.first_step, event.data.last_step)
            found.setdefault(key, {})[event.data.rank] = event.data
            last_ids.setdefault(key, event.id)
        elif isinstance(event.data, e.ProfileFailed):
            failures.append(event)
    failed = _by_group(failures, last_ids)
    return tuple(
        StepProfile(*key, tuple(ranks[rank] for rank in sorted(ranks)), failed.get(key, ()))
        for key, ranks in sorted(found.items())
    )


def _by_group(
    failures: Sequence[m.Event], first_ids: dict[tuple[int, int], int]
) -> dict[tuple[int, int], tuple[e.ProfileFailed, ...]]:
    made: dict[tuple[int, int], tuple[e.ProfileFailed, ...]] = {}
    for event in failures:
        if first_ids and isinstance(event.data, e.ProfileFailed):
            near = min(first_ids, key=lambda key: abs(first_ids[key] - event.id))
            made[near] = (*made.get(near, ()), event.data)
    return made


def phase_of(rank: e.Profiled, name: str) -> m.PhaseProfile | None:
    """A rank's phase of that name."""
    return next((phase for phase in rank.phases if phase.name == name), None)
