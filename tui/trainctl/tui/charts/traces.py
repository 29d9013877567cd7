"""A line of a chart as it is to be drawn: its buckets on the x axis and the y scale, cut to what is in view. Pure."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from trainctl.tui.charts.axis import Axis, Scale
from trainctl.tui.state.series import Window

Floats = NDArray[np.float64]
_PAUSE_SPANS = 6.0
"""Neighbouring buckets further apart on the axis than this many of the usual are not joined: nothing ran between."""
_SPARSE_SPANS = 6.0
"""Spans between two values beyond which a line breaks, where not every step has a value."""


@dataclass(frozen=True)
class Trace:
    """A metric's window to draw, named `label` at its end, in a role, with a letter for where colours don't show.

    `axis` is that of the run it is of. `points` draws single values instead of a line, and a `sparse` line joins values
    over the steps that have none; with `band` the extremes take that role, and the mean runs in `role` through them.
    """

    window: Window
    label: str
    role: str
    axis: Axis = field(default_factory=Axis)
    points: bool = False
    letter: str = ""
    metric: str = ""
    band: str = ""
    sparse: bool = False

    @property
    def held_steps(self) -> float:
        """Return for how many steps a bucket tells the value."""
        return held_steps(self.window, sparse=self.sparse)


def held_steps(window: Window, *, sparse: bool) -> float:
    """Return for how many steps a bucket of a window tells the value; in a sparse one until the next is overdue."""
    size = float(window.bucket_steps)
    if not sparse or len(window) < 2:
        return size
    return max(size, _SPARSE_SPANS * float(np.median(np.diff(window.first))))


@dataclass(frozen=True)
class Shape:
    """A trace in a frame from x0 up to x1: parallel arrays of buckets that reach into it, with the heights of their
    lowest, mean, highest and last values, NaN where there is none.

    `joins` is one shorter. `broken` and `undrawn` are the x of values that aren't finite, and of those that the scale
    has no height for.
    """

    x: Floats
    low: Floats
    mean: Floats
    high: Floats
    last: Floats
    smoothed: Floats  # empty without smoothing
    joins: NDArray[np.bool_]
    broken: Floats
    undrawn: Floats

    def bounds(self) -> tuple[Floats, Floats]:
        """Return finite lowest and highest heights."""
        return self.low[np.isfinite(self.low)], self.high[np.isfinite(self.high)]


def shape(
    trace: Trace, x0: float, x1: float, scale: Scale, half_life_steps: float = 0.0, *, clip: bool = True
) -> Shape:
    """Return what of a trace is in view. A bucket cut by an edge keeps its extremes. Without `clip` the one that begins
    before x0 stays there, outside the frame."""
    window = trace.window
    if not len(window) or not trace.axis.known:
        none = np.empty(0)
        return Shape(none, none, none, none, none, none, np.empty(0, bool), none, none)
    starts = window.first.astype(np.float64)
    x = trace.axis.to_x(np.maximum(starts, 1.0) if clip else starts)
    ends = trace.axis.to_x(starts + window.bucket_steps)
    inside = np.flatnonzero((ends > x0) & (x < x1))
    part = slice(int(inside[0]), int(inside[-1]) + 1) if len(inside) else slice(0, 0)
    soft = smooth(window, half_life_steps)[part] if half_life_steps and not trace.points else np.empty(0)
    low, high = window.minimum[part], window.maximum[part]
    undrawn = ~np.isfinite(scale.place(low)) & np.isfinite(low)
    floor = np.where(undrawn & (high > 0), high, low)  # what there is above zero is drawn
    at, left = x[part], x0 if clip else -np.inf
    return Shape(
        x=np.clip(at, left, None),
        low=scale.place(floor),
        mean=_within(scale.place(window.mean[part]), scale.place(floor), scale.place(high)),
        high=scale.place(high),
        last=scale.place(window.last[part]),
        smoothed=scale.place(soft),
        joins=_joins(starts[part], at, trace),
        broken=np.clip(at[window.broken[part] > 0], left, None),
        undrawn=np.clip(at[undrawn], left, None),
    )


def _within(mean: Floats, low: Floats, high: Floats) -> Floats:
    """Return the mean within the range of its values, which it can miss by a rounding."""
    return np.where(np.isfinite(mean), np.clip(mean, low, high), mean)


def _joins(starts: Floats, x: Floats, trace: Trace) -> NDArray[np.bool_]:
    """Return whether a line joins each bucket to the next: no step is missing between them, and in time no pause."""
    near = np.diff(starts) <= max(1.5 * trace.window.bucket_steps, trace.held_steps)
    if trace.axis.kind != "time" or len(x) < 3:
        return np.asarray(near, bool)
    apart = np.diff(x)
    return np.asarray(near & (apart <= _PAUSE_SPANS * float(np.median(apart))), bool)


def smooth(window: Window, half_life_steps: float) -> NDArray[np.float64]:
    """Return for each bucket the mean of all values up to it, where one loses half its weight in `half_life_steps`
    steps.

        s_i = sum_j<=i  n_j v_j d^(t_i - t_j)  /  sum_j<=i  n_j d^(t_i - t_j),    d = 2^(-1 / half_life_steps)

    v_j is a bucket's mean, n_j how many finite values it has and t_j its first step. The division is what corrects the
    start's bias; steps that are missing let older values fade for as long as they last; values that aren't finite count
    for nothing. NaN where a bucket has no finite value, so that gaps stay gaps.
    """
    mean, count = window.mean.tolist(), window.count.tolist()
    faded = np.exp2(-np.diff(window.first, prepend=window.first[:1]) / half_life_steps).tolist()
    made, total, weight = [], 0.0, 0.0
    for value, values, fade in zip(mean, count, faded, strict=True):
        total, weight = total * fade, weight * fade
        if values > 0:
            total, weight = total + value * values, weight + values
        made.append(total / weight if values > 0 else np.nan)
    return np.asarray(made, np.float64)


@dataclass(frozen=True)
class Reading:
    """A trace in one bucket, or at one point: `first` to `last` step."""

    first: int
    last: int
    minimum: float
    mean: float
    maximum: float
    broken: int


def reading(trace: Trace, x: float) -> Reading | None:
    """Return the bucket of a trace at x, None in a gap; of points the last one at or before it."""
    window = trace.window
    if not len(window) or not trace.axis.known:
        return None
    step = float(trace.axis.to_step(x)) + 1e-6
    place = int(np.searchsorted(window.first, step, side="right")) - 1
    if place < 0 or (step >= window.first[place] + trace.held_steps and not trace.points):
        return None
    first = int(window.first[place])
    values = (float(window.minimum[place]), float(window.mean[place]), float(window.maximum[place]))
    return Reading(first, first + window.bucket_steps - 1, *values, int(window.broken[place]))
