"""Held-out pairs as lines: their margins over the evaluations, the worst first, and one pair in full."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainctl.protocol.messages import WORST_PAIRS, EvaluatedPair, HeldOutPairs
from trainctl.tui.text.styled_line import Line, Piece, filled, fit, line, one_line, rule, shorten, wrap_lines

_COLUMN_CELLS = 23
"""Cells of an evaluation's column at least, with the gap before it."""
_NO_PAIRS = (
    ("no held-out pairs yet", "strong"),
    ("", "text"),
    ("e evaluates now.", "text"),
    ("For evaluations at regular steps, set in the run file:", "text"),
    ("", "text"),
    ("[evaluate]", "dim"),
    ("every_steps = 100", "dim"),
)


@dataclass(frozen=True)
class ChosenPair:
    """The choice that is looked at."""

    index: int | None = None  # of a pair; None: the worst
    step: int | None = None  # of an evaluation; None: the newest


@dataclass(frozen=True)
class PairTable:
    """A run's held-out pairs, by evaluation."""

    evaluations: tuple[HeldOutPairs, ...]  # ascending
    chosen: ChosenPair

    @classmethod
    def of(cls, evaluations: Iterable[HeldOutPairs], chosen: ChosenPair) -> "PairTable":
        return cls(tuple(sorted(evaluations, key=lambda evaluation: evaluation.step)), chosen)

    @property
    def step_index(self) -> int:
        """Return the place of the chosen evaluation; of a step without one that of the evaluation before it."""
        at = self.chosen.step
        if at is None:
            return len(self.evaluations) - 1
        return max((place for place, one in enumerate(self.evaluations) if one.step <= at), default=0)

    @property
    def rows(self) -> list[EvaluatedPair]:
        """Return the pairs of the chosen evaluation, the lowest margin first."""
        found = self.evaluations[self.step_index].pairs if self.evaluations else ()
        return sorted(found, key=lambda pair: -math.inf if math.isnan(pair.margin) else pair.margin)

    @property
    def prompt_index(self) -> int:
        """Return the place of the chosen pair among `rows`."""
        return next((row for row, pair in enumerate(self.rows) if pair.index == self.chosen.index), 0)

    def at(self, place: int, index: int) -> EvaluatedPair | None:
        """Return what an evaluation found of a pair; None if it doesn't say."""
        return next((pair for pair in self.evaluations[place].pairs if pair.index == index), None)

    def to_prompt(self, row: int) -> ChosenPair:
        rows = self.rows
        return replace(self.chosen, index=rows[min(max(row, 0), len(rows) - 1)].index) if rows else self.chosen

    def to_step(self, place: int) -> ChosenPair:
        """Choose another; the newest is followed."""
        at = min(max(place, 0), len(self.evaluations) - 1)
        step = self.evaluations[at].step if 0 <= at < len(self.evaluations) - 1 else None
        return replace(self.chosen, step=step)


def title(table: PairTable) -> str:
    """Return the title of the rule above."""
    count, times = len(table.rows), len(table.evaluations)
    when = f"{times} evaluation{'s' if times != 1 else ''}"
    counted = f": margin chosen/rejected, lowest of {count} first, {when}" if count else ""
    return f"─ held-out pairs{counted} "


def body(table: PairTable, columns: int, rows: int) -> list[Line]:
    """Return exactly `rows` lines."""
    if not table.rows:
        lines = [line(Piece(text, role)) for text, role in _NO_PAIRS]
    else:
        above = max(4, rows * 3 // 5)
        lines = _margins(table, columns, above) + _in_full(table, columns)
    return filled(lines, columns, rows)


def _margins(table: PairTable, columns: int, rows: int) -> list[Line]:
    left = min(max(columns // 4, 18), 40)
    count = max((columns - left) // _COLUMN_CELLS, 1)
    cells = (columns - left) // count
    last = max(table.step_index + 1, min(count, len(table.evaluations)))
    places = range(max(0, last - count), last)
    heads = [_head(table, place, cells) for place in places]
    start = min(max(table.prompt_index - (rows - 2), 0), max(len(table.rows) - (rows - 1), 0))
    label = fit(line(Piece("  PAIR", "label")), left)
    lines: list[Line] = [(*label, *(piece for head in heads for piece in head))]
    for row, pair in enumerate(table.rows[start : start + rows - 1], start):
        name = _name(table, row, pair, left)
        figures = [
            _figures(table.at(place, pair.index), cells, is_chosen=row == table.prompt_index) for place in places
        ]
        lines.append((*name, *(piece for found in figures for piece in found)))
    return lines + [()] * (rows - len(lines))


def _head(table: PairTable, place: int, cells: int) -> Line:
    role = "cursor" if place == table.step_index else "label"
    return fit(line(Piece(f"@{table.evaluations[place].step:,}", role, f"screen.choose_step({place})")), cells)


def _name(table: PairTable, row: int, pair: EvaluatedPair, left: int) -> Line:
    text = shorten(f"#{pair.index} {one_line(pair.prompt)}", left - 3)
    is_chosen = row == table.prompt_index
    mark = Piece("▸" if is_chosen else " ", "key")
    role = "cursor" if is_chosen else "text" if row < WORST_PAIRS else "dim"
    return fit(line(mark, " ", Piece(text, role, f"screen.choose_prompt({row})")), left)


def _figures(pair: EvaluatedPair | None, cells: int, *, is_chosen: bool) -> Line:
    if pair is None:
        return fit(line(Piece("n/a", "dim")), cells)
    role = "bad" if not pair.margin > 0 else "strong" if is_chosen else "text"
    rewards = Piece(f" {pair.chosen:+.2f}/{pair.rejected:+.2f}", "dim")
    return fit(line(Piece(f"{pair.margin:+.3f}", role), rewards), cells)


def _in_full(table: PairTable, columns: int) -> list[Line]:
    pair, step = table.rows[table.prompt_index], table.evaluations[table.step_index].step
    label = f"─ pair #{pair.index} @{step:,}  margin {pair.margin:+.3f} "
    parts = (
        ("prompt", pair.prompt),
        (f"chosen {pair.chosen:+.3f}", pair.chosen_text),
        (f"rejected {pair.rejected:+.3f}", pair.rejected_text),
    )
    lines = [rule(columns, (0, shorten(label, columns), "title"))]
    for name, text in parts:
        lines.append(line(Piece(f"  {name}", "label")))
        lines += [line(Piece(f"    {row}")) for row in wrap_lines(text, max(columns - 4, 1))]
    return lines
