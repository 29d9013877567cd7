"""Values of single steps from an agent's history, which answers in buckets: what to ask for at once, and what a reply
says of which step. Pure."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.record.schema import ROLLUP_LEVELS

MOST_COLUMNS: Final = 2000
METRICS_AT_ONCE: Final = 16
"""As many columns and metrics as a history request may name."""
VALUES: Final = 20_000
"""Most in one reply, some 40 bytes each, so that it stays below the frame limit."""


class Question(NamedTuple):
    """A history request in whose reply each of the steps, ascending, has a bucket of its own."""

    names: tuple[str, ...]
    steps: tuple[int, ...]

    @property
    def columns(self) -> int:
        return min(self.steps[-1] - self.steps[0] + 1, MOST_COLUMNS)


class Value(NamedTuple):
    """What a metric was at a step; `rank` None: the run's."""

    step: int
    rank: int | None
    name: str
    value: float


def questions(names: Sequence[str], steps: Sequence[int], ranks: int, values_from: int = 0) -> Iterator[Question]:
    """What to ask for `names` of so many ranks at steps that exist, ascending, however far apart their numbers are.
    From `values_from` on metrics by name are kept singly."""
    for start in range(0, len(names), METRICS_AT_ONCE):
        some = tuple(names[start : start + METRICS_AT_ONCE])
        most = max(1, VALUES // (len(some) * (ranks + 1)))
        for part in (
            tuple(step for step in steps if step < values_from),
            tuple(step for step in steps if step >= values_from),
        ):
            for told in _parts(part, most):
                yield Question(some, told)


def values(history: m.History, steps: Sequence[int]) -> Iterator[Value]:
    """What the reply to a question says of its steps. Metrics by name that are no longer kept singly are left out."""
    for series in history.series:
        least = history.values_from if m.is_by_name(series.metric) else 0
        own = {step // series.bucket_steps * series.bucket_steps: step for step in steps if step >= least}
        for start, value in zip(series.steps, series.last, strict=True):
            if start in own:
                yield Value(own[start], series.rank, series.metric, value)


def _parts(steps: tuple[int, ...], most: int) -> Iterator[tuple[int, ...]]:
    if len(steps) > most or not _are_told_apart(steps):
        half = len(steps) // 2
        yield from _parts(steps[:half], most)
        yield from _parts(steps[half:], most)
    elif steps:
        yield steps


def _are_told_apart(steps: Sequence[int]) -> bool:
    """Whether no bucket has two of them, where an agent makes as many as it may: at most twice as large as they need be
    to be so few, and as large as the finest rollups."""
    if len(steps) < 2 or steps[-1] - steps[0] < MOST_COLUMNS:
        return True
    largest = max(ROLLUP_LEVELS[0], 2 * -(-(steps[-1] - steps[0] + 1) // (MOST_COLUMNS - 1)))
    return min(later - earlier for earlier, later in pairwise(steps)) >= largest
