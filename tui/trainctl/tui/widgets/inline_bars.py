"""Figures drawn as characters: where a step went as letters, a trend as a sparkline, a part as blocks."""

from collections.abc import Sequence
from itertools import pairwise

from trainctl.protocol.messages import BUSY_PHASES, Phases
from trainctl.tui.state import series
from trainctl.tui.text.formatting import NA
from trainctl.tui.text.styled_line import Line, Piece, line

BAR_PHASES = (
    *((name, name[0], f"phase_{name[0]}") for name in BUSY_PHASES),
    ("wait", ".", "phase_wait"),
    ("sync", "s", "phase_s"),
    ("optimizer", "o", "phase_o"),
)
"""Phases in the order of the bar, with their letters and roles. A wait, for slower ranks or for the plan, is `.`."""

_SPARKS = "▁▂▃▄▅▆▇█"


def sparkline(window: series.Window, size: int) -> str:
    """Return the last steps' values, each cell the mean of its part; the middle is their middle, and a tenth more or
    less shows."""
    values = [value for value in window.last[-8 * size :].tolist() if value == value]
    if len(values) < 2:
        return ""
    parts = min(size, len(values))
    ends = [part * len(values) // parts for part in range(parts + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(ends)]
    low, high = min(means), max(means)
    span = max(high - low, 0.2 * abs(high)) or 1.0
    top = len(_SPARKS) - 1
    return "".join(_SPARKS[round(top * (0.5 + (mean - (low + high) / 2) / span))] for mean in means)


def phase_bar(phases: Phases, size: int, whole_seconds: float, *, waited: float = 0.0, loud: str = "") -> Line:
    """Return letters in proportion to the seconds of each phase; `whole_seconds` fills `size` cells.

    `waited` seconds of sync were spent waiting for other ranks; the letters of the phase named `loud` are capitals.
    """
    seconds = [max(getattr(phases, name), 0.0) for name, *_ in BAR_PHASES]
    moved = min(max(waited, 0.0), seconds[4])
    seconds[3], seconds[4] = seconds[3] + moved, seconds[4] - moved
    total = sum(seconds)
    if total <= 0 or whole_seconds <= 0:
        return line(Piece(NA, "dim"))
    counts = in_cells(seconds, min(round(size * total / max(whole_seconds, total)), size))
    letters = [(letter.upper() if name == loud else letter, role) for name, letter, role in BAR_PHASES]
    return line(*(Piece(letter * many, role) for (letter, role), many in zip(letters, counts, strict=True)))


def in_cells(parts: Sequence[float], cells: int) -> list[int]:
    """Return `cells` cells in proportion to `parts`, whose sum is above 0, by largest remainders."""
    whole = sum(parts)
    exact = [cells * part / whole for part in parts]
    counts = [int(part) for part in exact]
    by_rest = sorted(range(len(exact)), key=lambda index: counts[index] - exact[index])
    for index in by_rest[: cells - sum(counts)]:
        counts[index] += 1
    return counts


def share_bar(part: float, cells: int) -> Piece:
    """Return a part of one in blocks, at least one of them for anything above nothing."""
    blocks = max(round(part * cells), 1 if cells and part > 0 else 0)
    return Piece("▇" * min(blocks, max(cells, 0)), "bar")
