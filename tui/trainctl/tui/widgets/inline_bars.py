"""Figures drawn as characters: where a step went as letters, a trend as a sparkline, a part as blocks, and a node's
memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from typing import Final

from trainctl.protocol.messages import BUSY_PHASES, MEMORY_PARTS, HostReading, Phases, RankStep
from trainctl.tui.state import series
from trainctl.tui.state.rank_rows import Row
from trainctl.tui.text.formatting import NA, gigabytes, percent, used_of
from trainctl.tui.text.styled_line import Line, Piece, filled, fit, line

FULL_PART: Final = 0.92
"""Part of the whole from which a line warns."""
_ROLES = {"weights": "series0", "gradients": "series4", "moments": "series2", "activations": "series3"}
_BEFORE_BAR = 33
"""Cells."""


@dataclass(frozen=True)
class Used:
    """A line of the breakdown, in bytes; None: not known."""

    name: str
    used: float | None
    whole: float | None = None

    @property
    def part(self) -> float | None:
        """Return the part of the whole."""
        return self.used / self.whole if self.used is not None and self.whole else None


@dataclass(frozen=True)
class MemoryPart:
    """A part of a step's peak."""

    name: str
    used: float  # bytes

    @property
    def letter(self) -> Piece:
        """Return the letter that stands for it in a bar, where colour alone must not say it."""
        return Piece(self.name[0], _ROLES[self.name])


def memory_lines(row: Row, columns: int, rows: int) -> list[Line]:
    """Return the breakdown in exactly `rows` lines. Parts stand two to a line if there are few rows; of the lines below
    them, those that say least are left out."""
    step, cap = row.step, row.step.memory_cap_bytes if row.step else None
    peak, parts, below = step.peak_or_held_bytes if step else None, _parts(step), _below(row, cap)
    drawn = [_line(Used("step peak", peak, cap), columns, parts)]
    if len(drawn) + len(parts) + len(below) <= rows:
        drawn += [_part_line(part, cap, columns) for part in parts]
    else:
        drawn += _pairs(parts, columns)
    drawn += [_line(one, columns) for one in _most_telling(below, rows - len(drawn))]
    return filled(drawn, columns, rows)


def _parts(step: RankStep | None) -> list[MemoryPart]:
    """Return what the step's peak consists of, as far as it is known."""
    values = step.values if step is not None else {}
    known = {name: values.get(f"memory_{name}_bytes") for name in MEMORY_PARTS}
    return [MemoryPart(name, used) for name, used in known.items() if used is not None]


def _below(row: Row, cap: float | None) -> list[Used]:
    step, host, gpu = row.step, row.host, row.gpu
    trees = [item.memory_bytes for item in (host.processes if host else ()) if item.rank == row.view.rank]
    cache = step.values.get("memory_cache_bytes") if step else None
    return [
        Used("held after", step.memory_bytes if step else None, cap),
        *([Used("cache", cache, cap)] if cache is not None else []),
        Used("machine", host.memory_used_bytes if host else None, host.memory_total_bytes if host else None),
        Used("device", gpu.memory_used_bytes if gpu else None, gpu.memory_total_bytes if gpu else None),
        Used("resident", sum(size for size in trees if size is not None) if trees else None),
        disk(host),
    ]


def disk(host: HostReading | None) -> Used:
    """Return what is used of the disk that holds the runs, or only what is free where its size isn't known."""
    free, total = (host.disk_free_bytes, host.disk_total_bytes) if host else (None, None)
    return Used("disk free", free) if free is None or total is None else Used("disk", total - free, total)


def _most_telling(found: Sequence[Used], rows: int) -> list[Used]:
    """Return at most `rows` of them, without the process's size, what isn't known and what was held after the step, as
    far as they must go."""
    kept = list(found)
    for name in ("resident", *(one.name for one in found if one.used is None), "held after"):
        if len(kept) > rows:
            kept = [entry for entry in kept if entry.name != name]
    return kept


def _line(one: Used, columns: int, parts: Sequence[MemoryPart] = ()) -> Line:
    text = NA if one.used is None else f"{used_of(one.used, one.whole)} GB"
    warned = "warning" if one.part is not None and one.part > FULL_PART else ""
    bar = _bar(one.part, warned or "bar", columns)
    cells = len(bar.text) if one.part is not None else max(columns - _BEFORE_BAR, 0)
    return line(
        Piece(f" {one.name.ljust(10)}", "label"),
        Piece(text.rjust(13), "dim" if one.used is None else warned or "text"),
        Piece(_percent(one.part), warned or "strong"),
        *(_letters(parts, cells) or [bar]),
    )


def _percent(part: float | None) -> str:
    return (percent(part) if part is not None else "").rjust(6) + "  "


def _bar(part: float | None, role: str, columns: int) -> Piece:
    return share_bar(min(part or 0.0, 1.0), max(columns - _BEFORE_BAR, 0))._replace(role=role)


def _letters(parts: Sequence[MemoryPart], cells: int) -> list[Piece]:
    sizes = [part.used for part in parts]
    counts = in_cells(sizes, cells) if sum(sizes) > 0 else []
    return [part.letter._replace(text=part.letter.text * many) for part, many in zip(parts, counts, strict=False)]


def _part_line(part: MemoryPart, cap: float | None, columns: int) -> Line:
    of_cap = Used(part.name, part.used, cap).part
    return line(
        " ",
        part.letter,
        Piece(f" {part.name.ljust(11)}", "label"),
        Piece(f"{gigabytes(part.used)} GB".rjust(10)),
        Piece(_percent(of_cap), "strong"),
        _bar(of_cap, part.letter.role, columns),
    )


def _pairs(parts: Sequence[MemoryPart], columns: int) -> list[Line]:
    size = columns // 2
    cells = [
        line(" ", part.letter, Piece(f" {part.name.ljust(11)}", "label"), Piece(gigabytes(part.used).rjust(5)))
        for part in parts
    ]
    return [(*fit(left, size), *right) for left, right in zip_longest(cells[::2], cells[1::2], fillvalue=())]


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
