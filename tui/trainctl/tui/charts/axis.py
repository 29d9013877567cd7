"""The axes of a chart: steps, tokens or time across, linear or logarithmic values up, and round labels. Pure."""

import datetime
import math
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.messages import Series
from trainctl.tui.text.formatting import NA, duration, moment

Floats = NDArray[np.float64]
_MIN_DECADES = 0.02
_MANTISSAS = ((1,), (1, 3), (1, 2, 5))


@dataclass(frozen=True)
class Scale:
    """The y axis: a value stands at itself or at its decimal logarithm, where what isn't above zero stands nowhere."""

    log: bool = False

    def place(self, values: Floats) -> Floats:
        """Return heights of values, NaN where there is none. It keeps their order."""
        if not self.log:
            return np.asarray(values, np.float64)
        positive = np.where(values > 0, values, np.nan)
        return np.asarray(np.log10(positive), np.float64)

    def range_of(self, low: float, high: float, min_span: float) -> tuple[float, float]:
        """Return the heights to draw for values from `low` to `high`, with a little air."""
        if not self.log:
            return widened(low, high, min_span)
        bottom, top = math.log10(low), math.log10(high)
        air = max(0.04 * (top - bottom), (_MIN_DECADES - (top - bottom)) / 2)
        return bottom - air, top + air

    def ticks(self, bottom: float, top: float, rows: int) -> dict[float, str]:
        """Return height -> text, about one per two rows: decades and parts of them, where the range has few decades
        round values."""
        if not self.log:
            return tick_labels(bottom, top, rows)
        most = max(2, min(8, rows // 2))
        decades = range(math.floor(bottom), math.ceil(top) + 1)
        marks: list[float] = []
        for parts in _MANTISSAS:
            found = [decade + math.log10(part) for decade in decades for part in parts]
            inside = [height for height in found if bottom <= height <= top]
            if len(inside) > most and marks:
                break
            marks = inside
        if len(marks) < 2:
            values = tick_labels(10.0**bottom, 10.0**top, rows)
            return {math.log10(value): words for value, words in values.items() if value > 0}
        marks = marks[:: -(-len(marks) // most)]
        return {height: _decimal(10.0**height) for height in marks}


def _decimal(value: float) -> str:
    """Return a value with one digit that counts: 1e-5, 0.001, 0.02, 5, 300, 1e6."""
    if 1e-3 * 0.999 <= value < 99999:
        return f"{value:.{max(0, -math.floor(math.log10(value) + 1e-9))}f}"
    digit, _, exponent = f"{value:.0e}".partition("e")
    return f"{digit}e{int(exponent)}"


def widened(low: float, high: float, min_span: float = 0.02) -> tuple[float, float]:
    """Return a range with a little air, at least `min_span` of its values' size tall; around all zeros it is 1
    tall."""
    size = high - low
    floor = min_span * max(abs(low), abs(high))
    if size < floor or size == 0:
        middle, half = (low + high) / 2, floor / 2 or 0.5
        return _snapped(middle - half, middle + half)
    return _snapped(low - 0.04 * size, high + 0.04 * size)


def _snapped(low: float, high: float) -> tuple[float, float]:
    """Return the range outward to multiples of about a sixteenth of it, so that a new extreme seldom moves every
    dot."""
    unit = 2.0 ** math.floor(math.log2((high - low) / 12))
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


_FINEST = 1e-290  # steps between ticks below this are lost in what a float can tell apart


def tick_labels(low: float, high: float, rows: int) -> dict[float, str]:
    """Return round values within low..high, about one per two rows and at least one, with texts just precise enough."""
    wanted = max(2, min(8, rows // 2))
    rough = (high - low) / wanted
    if rough < _FINEST:
        middle = (low + high) / 2
        return {middle: f"{middle:.3g}"}
    scale = 10.0 ** math.floor(math.log10(rough))
    step = next(scale * part for part in (1, 2, 2.5, 5, 10) if scale * part >= rough * 0.999)
    ticks = [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)] or [(low + high) / 2]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    if abs(step * 10**digits - round(step * 10**digits)) > 1e-6:
        digits += 1
    if digits > 4 or max(abs(tick) for tick in ticks) >= 1e5:
        return {tick: f"{tick:.1e}".replace("e-0", "e-").replace("e+0", "e") for tick in ticks}
    return {tick: f"{tick:.{digits}f}" for tick in ticks}


Kind = Literal["step", "tokens", "time"]
KINDS: Final[tuple[Kind, ...]] = ("step", "tokens", "time")
METRIC_OF: Final[dict[Kind, str]] = {"tokens": "tokens_total", "time": "committed_at"}
"""The metric in which a record keeps what stands on the axis."""

_TIME_STEPS: Final = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0, 3600.0, 7200.0, 10800.0, 21600.0),
    *(43200.0, 86400.0, 172800.0, 604800.0),
)


@dataclass(frozen=True)
class Axis:
    """The place of each step: on straight lines between knots, and on the mean slope outside them.

    Both arrays ascend strictly and are of one length; without knots x is the step itself. `values` are tokens, or Unix
    seconds less `origin_seconds`.
    """

    kind: Kind = "step"
    steps: Floats = field(default_factory=lambda: np.empty(0))
    values: Floats = field(default_factory=lambda: np.empty(0))
    origin_seconds: float = 0.0

    @property
    def known(self) -> bool:
        """Return whether it can be drawn on: steps always, else from two knots on."""
        return self.kind == "step" or len(self.steps) > 1

    def to_x(self, steps: Floats | float) -> Floats:
        """Return the x of steps, of any shape."""
        return _between(np.asarray(steps, np.float64), self.steps, self.values)

    def to_step(self, x: Floats | float) -> Floats:
        """Return the steps, not whole ones, of x values of any shape."""
        return _between(np.asarray(x, np.float64), self.values, self.steps)


def _between(at: Floats, known: Floats, values: Floats) -> Floats:
    if len(known) < 2:
        return at
    slope = (values[-1] - values[0]) / (known[-1] - known[0])
    inside = np.interp(at, known, values)
    return np.asarray(inside + slope * (np.minimum(at - known[0], 0.0) + np.maximum(at - known[-1], 0.0)), np.float64)


def axis_of(kind: Kind, coarse: Series | None, fine: Series | None, *, elapsed: bool = False) -> Axis:
    """Return the axis from what a record says about its metric over the whole run, and more exactly over a part of it.

    With `elapsed` times count from the run's first step.
    """
    if kind == "step":
        return Axis()
    steps, values = _knots(coarse)
    near, exact = _knots(fine)
    if len(near):
        outside = (steps < near[0]) | (steps > near[-1])
        steps, values = np.concatenate([steps[outside], near]), np.concatenate([values[outside], exact])
    order = np.argsort(steps, kind="stable")
    steps, values = steps[order], values[order]
    # A clock that was set back, or a step that was made again, must not fold the axis.
    before = np.maximum.accumulate(np.concatenate([[-np.inf], values]))[: len(values)]
    good = (values > before) & (np.diff(steps, prepend=-np.inf) > 0)
    steps, values = steps[good], values[good]
    origin = float(values[0]) if elapsed and kind == "time" and len(values) else 0.0
    return Axis(kind, steps, values - origin, origin)


def continued(branch: Axis, parent: Axis, fork: int) -> Axis:
    """Return a branch's axis that continues its parent's from the step `fork`, the last that both have.

    Both are known and of one kind, and times are since each run's first step.
    """
    before = 0.0 if branch.kind == "tokens" else float(branch.to_x(fork))  # a branch counts its own tokens
    there = float(parent.to_x(fork))
    shared, own = parent.steps < fork, branch.steps > fork
    return Axis(
        branch.kind,
        np.concatenate([parent.steps[shared], [fork], branch.steps[own]]),
        np.concatenate([parent.values[shared], [there], branch.values[own] - before + there]),
        branch.origin_seconds + before - there,
    )


def _knots(series: Series | None) -> tuple[Floats, Floats]:
    """Return the first and last value of each bucket; the last one's step is known only where the next bucket says
    so."""
    if series is None or not series.steps:
        return np.empty(0), np.empty(0)
    first = np.asarray(series.steps, np.float64)
    low, high = np.asarray(series.minimum, np.float64), np.asarray(series.maximum, np.float64)
    if series.bucket_steps == 1:
        return first, high
    first, last = np.maximum(first, 1.0), first + series.bucket_steps - 1
    known = np.append(first[1:] == last[:-1] + 1, False)
    return np.concatenate([first, last[known]]), np.concatenate([low, high[known]])


def ticks(axis: Axis, low: float, high: float, columns: int, zone: datetime.tzinfo | None) -> list[tuple[float, str]]:
    """Return round x values in low..high with their texts, as many as stand apart on `columns` cells."""
    if not high > low or columns < 4:
        return []
    if axis.kind == "time":
        step = _time_step(low, high, columns)
        shift = 0.0 if axis.origin_seconds else _offset(high, zone)
    else:
        step, shift = _round_step(low, high, columns), 0.0
    start = math.ceil((low + shift) / step - 1e-9)
    count = int((high + shift) / step + 1e-9) - start + 1
    found = [(start + index) * step - shift for index in range(min(max(count, 0), columns))]
    return [(x, text(axis, x, high - low, zone)) for x in found]


def _round_step(low: float, high: float, columns: int) -> float:
    rough = max((high - low) / max(columns // 14, 1), 1.0)
    scale = 10.0 ** math.floor(math.log10(rough))
    return next(scale * part for part in (1.0, 2.0, 5.0, 10.0) if scale * part >= rough * 0.999)


def _time_step(low: float, high: float, columns: int) -> float:
    rough = (high - low) / max(columns // 14, 1)
    return next((step for step in _TIME_STEPS if step >= rough), math.ceil(rough / 604800.0) * 604800.0)


def _offset(at: float, zone: datetime.tzinfo | None) -> float:
    """Return seconds by which the zone's clock is ahead of UTC, so that round times are round there."""
    when = moment(at, zone)
    ahead = when.utcoffset() if when is not None else None
    return ahead.total_seconds() if ahead is not None else 0.0


def text(axis: Axis, x: float, span: float, zone: datetime.tzinfo | None) -> str:
    """Return an x value in words; `span` is how much the axis shows, which decides how exact they are."""
    if axis.kind == "step":
        return f"{math.floor(x + 1e-6):,}"
    if axis.kind == "tokens":
        return tokens(x, span)
    if axis.origin_seconds:
        return elapsed(x, span)
    when = moment(x, zone)
    if when is None:
        return NA
    if span > 6 * 86400:
        return f"{when.day} {when:%b}"
    if span > 86400:
        return f"{when:%a %H:%M}"
    return f"{when:%H:%M}" if span >= 600 else f"{when:%H:%M:%S}"


def tokens(value: float, span: float) -> str:
    """Return tokens with as many digits as tell apart what lies a hundredth of `span` apart: 1.2M, 597.71M, 0."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            digits = min(max(math.ceil(math.log10(100 * limit / span)), 0), 6) if span > 0 else 3
            text = f"{value / limit:.{digits}f}"
            return (text.rstrip("0").rstrip(".") if digits else text) + unit
    return f"{value:.0f}"


def elapsed(seconds: float, span: float) -> str:
    """Return a time since the start: 45s, 12m 30s, 3h 05m, 2d 4h."""
    return f"{seconds:.1f}s" if abs(seconds) < 60 and span < 30 else duration(seconds)
