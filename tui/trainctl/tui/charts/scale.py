"""The y axis of a chart: linear or logarithmic, its range and its labels. Pure."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
_LEAST_DECADES = 0.02
_MANTISSAS = ((1,), (1, 3), (1, 2, 5))


@dataclass(frozen=True)
class Scale:
    """How high a value stands: at itself, or at its decimal logarithm, where what isn't above zero stands nowhere."""

    log: bool = False

    def place(self, values: Floats) -> Floats:
        """Heights of values, NaN where there is none. It keeps their order."""
        if not self.log:
            return np.asarray(values, np.float64)
        positive = np.where(values > 0, values, np.nan)
        return np.asarray(np.log10(positive), np.float64)

    def range_of(self, low: float, high: float, least_span: float) -> tuple[float, float]:
        """The heights to draw for values from `low` to `high`, with a little air."""
        if not self.log:
            return widen(low, high, least_span)
        bottom, top = math.log10(low), math.log10(high)
        air = max(0.04 * (top - bottom), (_LEAST_DECADES - (top - bottom)) / 2)
        return bottom - air, top + air

    def ticks(self, bottom: float, top: float, rows: int) -> dict[float, str]:
        """Height -> text, about one per two rows: decades and parts of them, where the range has few decades round
        values."""
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
    """1e-5, 0.001, 0.02, 5, 300, 1e6: one digit that counts."""
    if 1e-3 * 0.999 <= value < 99999:
        return f"{value:.{max(0, -math.floor(math.log10(value) + 1e-9))}f}"
    digit, _, exponent = f"{value:.0e}".partition("e")
    return f"{digit}e{int(exponent)}"


def widen(low: float, high: float, least_span: float = 0.02) -> tuple[float, float]:
    """A range with a little air, at least `least_span` of its values' size tall; around all zeros it is 1 tall."""
    size = high - low
    floor = least_span * max(abs(low), abs(high))
    if size < floor or size == 0:
        middle, half = (low + high) / 2, floor / 2 or 0.5
        return _snapped(middle - half, middle + half)
    return _snapped(low - 0.04 * size, high + 0.04 * size)


def _snapped(low: float, high: float) -> tuple[float, float]:
    """Outward to multiples of about a sixteenth of the range, so that a new extreme seldom moves every dot."""
    unit = 2.0 ** math.floor(math.log2((high - low) / 12))
    return math.floor(low / unit) * unit, math.ceil(high / unit) * unit


_FINEST = 1e-290  # steps between ticks below this are lost in what a float can tell apart


def tick_labels(low: float, high: float, rows: int) -> dict[float, str]:
    """Round values within low..high, about one per two rows and at least one, with texts just precise enough."""
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
