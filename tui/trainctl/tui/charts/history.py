"""Requests of the charts to a record, and the window to draw from its answers and from what came since. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from trainctl.protocol.messages import METRICS, History, RankStep, Series, StepCommitted, metric_of
from trainctl.protocol.record.rollups import RANK_SERIES
from trainctl.tui.charts.axis import METRIC_OF, Axis, Kind, axis_of
from trainctl.tui.charts.metrics import NOT_FINITE, per_rank, style_of
from trainctl.tui.charts.viewport import Chart
from trainctl.tui.state import series
from trainctl.tui.state.view_state import ViewState

Key = tuple[str, int | None]
MAX_COLUMNS: Final = 2000
"""The protocol's limit to the buckets of a request."""
_MAX_METRICS: Final = 16
_MAX_NUMBERS: Final = 80_000
"""Numbers of a reply; the protocol's frames end at 1 MB, and a number takes nine bytes."""
_CAPACITY: Final = 8192
_TAIL_STEPS: Final = 1024
_STEPS: Final = ""
"""Stands among the tails for the steps whose parts came, whichever metrics they have."""


@dataclass(frozen=True)
class Ask:
    """One view's worth of a run: about as many buckets as `columns` between two steps; `end` is where the view ends,
    which may be to come."""

    run: str
    metrics: tuple[str, ...]
    first: int
    last: int
    columns: int
    end: int


@dataclass(frozen=True)
class Answer:
    """The answer of a record to an `Ask`: windows by metric and rank, and the series that the axes are made of."""

    ask: Ask
    windows: Mapping[Key, series.Window] = field(default_factory=lambda: MappingProxyType({}))
    axes: Mapping[str, Series] = field(default_factory=lambda: MappingProxyType({}))


def needed(charts: Iterable[Chart]) -> tuple[str, ...]:
    """Return the metrics that charts draw, with those that tell where a value isn't finite, and those of the axes."""
    picked = list(dict.fromkeys(pick.metric for chart in charts for pick in chart.picks))
    marks = [name + NOT_FINITE for name in picked if name + NOT_FINITE in METRICS]
    return (*picked, *marks, *METRIC_OF.values())


def ask_of(run: str, metrics: tuple[str, ...], span: tuple[float, float], newest: int, columns: int) -> Ask:
    """Return the request for the steps in view, `span`, of a run that has come to `newest`."""
    first = max(math.floor(span[0]), 1)
    last = max(min(math.ceil(span[1]), newest), first)
    return Ask(run, metrics, first, last, min(max(columns, 2), MAX_COLUMNS), math.ceil(span[1]))


def parts(ask: Ask, ranks: int) -> list[tuple[str, ...]]:
    """Return the ask's metrics in as many requests as the protocol's limits make of them."""
    made: list[list[str]] = [[]]
    numbers = 0
    for metric in ask.metrics:
        size = 5 * ask.columns * (max(ranks, 1) if per_rank(metric) else 1)
        if made[-1] and (len(made[-1]) == _MAX_METRICS or numbers + size > _MAX_NUMBERS):
            made.append([])
            numbers = 0
        made[-1].append(metric)
        numbers += size
    return [tuple(part) for part in made if part]


def answer_of(ask: Ask, replies: Sequence[History]) -> Answer:
    """Return the windows of the replies, with a broken bucket wherever a value wasn't finite."""
    recorded = [item for reply in replies for item in reply.series]
    axes = {item.metric: item for item in recorded if item.metric in METRIC_OF.values()}
    broken = {item.metric.removesuffix(NOT_FINITE): item for item in recorded if item.metric.endswith(NOT_FINITE)}
    windows: dict[Key, series.Window] = {}
    for item in recorded:
        if item.metric in ask.metrics and item.metric not in axes and not item.metric.endswith(NOT_FINITE):
            window = series.from_series(item, ask.last, _CAPACITY)
            marks = broken.get(item.metric)
            windows[item.metric, item.rank] = _with_broken(window, marks.steps) if marks is not None else window
    return Answer(ask, MappingProxyType(windows), MappingProxyType(axes))


def _with_broken(window: series.Window, steps: Iterable[int]) -> series.Window:
    for step in steps:
        window = series.add(window, step, math.nan)
    return window


@dataclass(frozen=True)
class _Found:
    """A window that is whole from step `first` to `last`."""

    first: float
    last: float
    window: series.Window


def window_of(
    answers: Sequence[Answer],
    state: ViewState | None,
    key: Key,
    span: tuple[float, float],
    tails: Mapping[Key, series.Window] = MappingProxyType({}),
) -> series.Window:
    """Return the best there is of a metric for the steps in view: the finest window that is whole over them, else the
    one that is over most of them, and after it what `state`, that of the run shown, and `tails` have seen since."""
    found = [_Found(item.ask.first, item.ask.last, item.windows[key]) for item in answers if key in item.windows]
    newer = lately(state, key, tails) if state is not None else series.empty()
    if state is not None and len(state.window(*key)):
        own = state.window(*key)  # of what no snapshot carries it begins where this program was attached
        found.append(_Found(max(int(own.first[0]), 1), own.newest_step, own))
    if not found:
        return newer
    newest = state.run.step if state is not None and state.run is not None else max(item.last for item in found)

    def worth(item: _Found) -> tuple[bool, float, int]:
        joined = len(newer) > 0 and int(newer.first[0]) <= item.last + 1
        late = 0.0 if joined else max(min(span[1], newest) - item.last, 0.0)
        missing = max(item.first - max(span[0], 1.0), 0.0) + late
        return missing >= item.window.bucket_steps, missing, item.window.bucket_steps

    best = min(found, key=worth)
    return series.appended(best.window, newer, int(best.last))


def lately(state: ViewState, key: Key, tails: Mapping[Key, series.Window] = MappingProxyType({})) -> series.Window:
    """Return the last steps of a metric as they came live; `tails` has those that the state itself keeps no window
    of."""
    newest = tails.get(key)
    return newest if newest is not None and len(newest) else state.lately(*key)


def collected(
    tails: Mapping[Key, series.Window], state: ViewState, charts: Iterable[Chart]
) -> dict[Key, series.Window]:
    """Return the tails with what the newest messages of the run and its ranks add of the metrics that charts draw.
    After a hole one begins again, because the record must then be asked again."""
    made = dict(tails)
    picks = [pick for chart in charts for pick in chart.picks if _is_tail(pick.metric, pick.rank)]
    of_run = dict.fromkeys(pick.metric for pick in picks if pick.rank is None)
    of_ranks = dict.fromkeys(pick.metric for pick in picks if pick.rank is not None)
    sources: list[tuple[int | None, Sequence[StepCommitted | RankStep], dict[str, None]]]
    sources = [(None, state.steps, of_run), *((rank, parts, of_ranks) for rank, parts in state.parts.items())]
    for rank, parts, picked in (source for source in sources if source[2]):
        steps = made.get((_STEPS, rank)) or series.empty()
        fresh = [part for part in parts if part.step > steps.newest_step]
        met = len(fresh) < len(parts)  # however far apart the steps' numbers are
        torn = bool(fresh) and not met and len(steps) > 0 and fresh[0].step > steps.newest_step + 1
        for metric in (*picked, _STEPS):
            window = series.empty(_TAIL_STEPS) if torn else made.get((metric, rank)) or series.empty(_TAIL_STEPS)
            if len(window) >= _TAIL_STEPS // 2:
                window = series.tail(window, window.newest_step - _TAIL_STEPS // 4)
            for part in fresh:
                value = part.step if metric == _STEPS else metric_of(metric).of(part)
                window = series.add(window, part.step, value) if value is not None else window
            made[metric, rank] = window
    return made


def _is_tail(metric: str, rank: int | None) -> bool:
    """Return whether the state keeps no window of it: of a rank, or the run's own."""
    return metric not in METRICS if rank is None else per_rank(metric) and metric not in RANK_SERIES


def is_torn(answer: Answer, state: ViewState, tails: Mapping[Key, series.Window]) -> bool:
    """Return whether steps are missing between what the record answered and what has come live since."""

    def came(metric: str, rank: int | None) -> series.Window:
        steps = tails.get((_STEPS, rank)) if _is_tail(metric, rank) else None
        return steps if steps is not None else lately(state, (metric, rank), tails)

    return any(
        len(newer) > 0 and int(newer.first[0]) > answer.ask.last + 1
        for metric, rank in answer.windows
        if not style_of(metric).points and (newer := came(metric, rank)) is not None
    )


def axis_for(kind: Kind, coarse: Answer | None, fine: Answer | None, state: ViewState | None, *, elapsed: bool) -> Axis:
    """Return the axis from a run's answers, and from its newest step where it is the live run."""
    metric = METRIC_OF.get(kind, "")
    whole, near = (answer.axes.get(metric) if answer is not None else None for answer in (coarse, fine))
    if state is not None and state.last_step is not None and metric:
        newest = state.last_step.value
        whole = _with_newest(whole, newest.step, newest.tokens_total if kind == "tokens" else newest.committed_at)
    return axis_of(kind, whole, near, elapsed=elapsed)


def _with_newest(recorded: Series | None, step: int, value: float) -> Series | None:
    if recorded is None or not recorded.steps or step < recorded.steps[-1] + recorded.bucket_steps:
        return recorded
    columns = {name: (*getattr(recorded, name), value) for name in ("minimum", "maximum", "mean", "last")}
    return Series(recorded.metric, None, recorded.bucket_steps, (*recorded.steps, step), **columns)
