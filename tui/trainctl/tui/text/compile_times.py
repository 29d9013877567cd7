"""When the model of a rank was compiled, and how long that took. Pure."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from trainctl.protocol import messages as m
from trainctl.tui.text import formatting as f

METRIC: Final = "compile_seconds"
BUCKETS: Final = 240
"""Of the whole run, in the first of two questions to the record; the second is about one of them."""


class Compilation(msgspec.Struct, frozen=True):
    """The compiler's time in a step, the longest of `first` to `last`."""

    first: int
    last: int
    seconds: float

    @property
    def text(self) -> str:
        """`41.0 s at step 1`."""
        at = f"at step {self.first:,}" if self.first == self.last else f"in steps {self.first:,} to {self.last:,}"
        return f"{f.seconds(self.seconds)} {at}"


def of_series(series: m.Series) -> list[Compilation]:
    """One for each bucket."""
    size = series.bucket_steps
    return [
        Compilation(max(first, 1), first + size - 1, seconds)
        for first, seconds in zip(series.steps, series.maximum, strict=True)
    ]


def longest(found: Iterable[Compilation]) -> Compilation | None:
    """Of those that are alike, one whose step is known exactly; None without any."""
    return max(found, key=lambda one: (one.seconds, one.first - one.last), default=None)


def by_rank(histories: Sequence[m.History]) -> dict[int, Compilation]:
    """The longest of each rank."""
    every: dict[int, list[Compilation]] = {}
    for series in (series for history in histories for series in history.series):
        if series.metric == METRIC and series.rank is not None:
            every.setdefault(series.rank, []).extend(of_series(series))
    return {rank: found for rank, one in every.items() if (found := longest(one)) is not None}


def is_compiled(run: m.RunView) -> bool:
    """Whether any rank says that it compiles its model."""
    return any(rank.compute is not None and rank.compute.compile != "off" for rank in run.ranks)
