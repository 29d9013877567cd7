"""The y axis of a chart: linear or logarithmic, its range and its labels. Pure."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trainctl.tui.charts.panel import tick_labels, widen

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

    def height(self, value: float) -> float:
        """One value's, NaN where it has none."""
        return float(self.place(np.array([value]))[0])

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
            return tick_labels(bottom, top, rows)[1]
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
            values = tick_labels(10.0**bottom, 10.0**top, rows)[1]
            return {math.log10(value): words for value, words in values.items() if value > 0}
        marks = marks[:: -(-len(marks) // most)]
        return {height: _decimal(10.0**height) for height in marks}


def _decimal(value: float) -> str:
    """1e-5, 0.001, 0.02, 5, 300, 1e6: one digit that counts."""
    if 1e-3 * 0.999 <= value < 99999:
        return f"{value:.{max(0, -math.floor(math.log10(value) + 1e-9))}f}"
    digit, _, exponent = f"{value:.0e}".partition("e")
    return f"{digit}e{int(exponent)}"
