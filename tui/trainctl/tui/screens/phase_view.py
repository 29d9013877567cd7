"""Where each of a rank's last steps went: of the record and of what came since as one list, and pictures of it."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from trainctl.protocol import messages as m
from trainctl.tui.charts.panel import page
from trainctl.tui.state import rank_speed
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, fit, from_cells, line
from trainctl.tui.widgets.inline_bars import PHASES, in_cells

PHASE_NAMES = ("data", "forward", "backward", "sync", "optimizer", "wait")
METRICS = (*(f"{name}_seconds" for name in PHASE_NAMES), "memory_bytes")
"""What of the record this is made from."""
STEPS = 240
"""Newest steps that are asked for."""
MOST_BUCKETS = 16_000
"""Over all ranks and metrics, so that the answer stays far below the frame limit."""
MEAN_STEPS = 16
"""Steps that the means in the table are of."""


class Lap(NamedTuple):
    """One rank's step; in `phases` the wait for slower ranks is told from the sum itself where that is known."""

    step: int
    phases: m.Phases
    memory_bytes: float | None

    @property
    def seconds(self) -> float:
        return float(sum(getattr(self.phases, name) for name in PHASE_NAMES))


@dataclass(frozen=True)
class Past:
    """What the record had of a run's last steps: rank -> step -> lap."""

    run: str = ""
    laps: Mapping[int, Mapping[int, Lap]] = field(default_factory=lambda: MappingProxyType({}))


def columns_of(ranks: int) -> int:
    """How many steps to ask the record for."""
    return min(STEPS, MOST_BUCKETS // (len(METRICS) * max(ranks, 1)))


def past_of(run: str, history: m.History) -> Past:
    """The steps of a reply that has them one by one; a bucket of several says nothing of any of them."""
    values: dict[int, dict[int, dict[str, float]]] = {}
    for series in history.series:
        if series.rank is None or series.bucket_steps != 1:
            continue
        for step, value in zip(series.steps, series.last, strict=True):
            values.setdefault(series.rank, {}).setdefault(step, {})[series.metric] = value
    return Past(run, {rank: _whole(steps) for rank, steps in values.items()})


def _whole(steps: Mapping[int, Mapping[str, float]]) -> dict[int, Lap]:
    """Of the steps all of whose phases are known."""
    made = {}
    for step, named in steps.items():
        phases = {name: named.get(f"{name}_seconds", math.nan) for name in PHASE_NAMES}
        if all(math.isfinite(value) for value in phases.values()):
            made[step] = Lap(step, m.Phases(**phases), named.get("memory_bytes"))
    return made


def laps(state: ViewState, past: Past, rank: int) -> list[Lap]:
    """A rank's known last steps, oldest first."""
    ranks = rank_speed.reporting(state.run) or sorted(state.laps)
    known = {other: _known(state, past, other) for other in {rank, *ranks}}
    return [_split(lap, [known[other].get(step) for other in ranks]) for step, lap in sorted(known[rank].items())]


def _known(state: ViewState, past: Past, rank: int) -> dict[int, Lap]:
    run = state.run.run if state.run else ""
    found = dict(past.laps.get(rank, {})) if past.run == run else {}
    found |= {part.step: Lap(part.step, part.phases, part.memory_bytes) for part in state.laps.get(rank, ())}
    return found


def _split(lap: Lap, others: Sequence[Lap | None]) -> Lap:
    """Of sync, what the least waiting rank didn't spend there is a wait; unknown unless all have told of the step."""
    syncs = [other.phases.sync for other in others if other is not None]
    if len(syncs) < 2 or len(syncs) < len(others):
        return lap
    own, waited = lap.phases, max(lap.phases.sync - min(syncs), 0.0)
    return lap._replace(
        phases=m.Phases(own.data, own.forward, own.backward, own.sync - waited, own.optimizer, own.wait + waited)
    )


def means(found: Sequence[Lap]) -> dict[str, float]:
    """Mean seconds of each phase over the last steps; empty without one."""
    newest = found[-MEAN_STEPS:]
    return {
        name: sum(getattr(lap.phases, name) for lap in newest) / len(newest) for name, _ in PHASES if newest
    }  # fmt: skip


def table(found: Sequence[Lap], columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Each phase's letter, name, mean and part of the step, in exactly `rows` lines."""
    mean = means(found)
    whole = sum(mean.values())
    made = []
    for name, letter in PHASES:
        role = "phase_wait" if letter == "." else f"phase_{letter}"
        part = mean[name] / whole if mean and whole > 0 else None
        size = max(columns - 29, 0)
        made.append(line(
            Piece(f" {letter} ", role), Piece(name.ljust(10), "label"),
            Piece(f.seconds(mean.get(name)).rjust(7), "text" if mean else "dim"),
            Piece(f.percent(part).rjust(6) + "  ", "strong" if mean else "dim"),
            Piece(glyphs.block * round(size * (part or 0.0)), role),
        ))  # fmt: skip
    steps = min(len(found), MEAN_STEPS)
    words = f"mean of {steps} steps" if steps > 1 else "of one step" if steps else "no step yet"
    made.append(line(Piece("   step      ", "label"), Piece(f.seconds(whole if mean else None).rjust(7), "strong"),
                     Piece(f"  {words}", "dim")))  # fmt: skip
    return [fit(pieces, columns) for pieces in (made + [()] * rows)[:rows]]


def stacked(found: Sequence[Lap], newest: int, columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """The last steps as columns of phase letters, seconds up, in exactly `rows` lines; a step that isn't known is a
    gap."""
    plot = rows - 1
    if not found or plot < 2 or columns < 20:
        text = line(Piece("  no step yet", "dim"))
        return [fit(text if row == rows // 2 and not found else (), columns) for row in range(rows)]
    top = _top(found)
    labels = {0: f.seconds(top).replace(" ", ""), plot // 2: f.seconds(top * (1 - (plot // 2) / plot)).replace(" ", "")}
    gutter = max(len(text) for text in labels.values()) + 1
    first, last = page(newest, columns - gutter)
    by_step = {lap.step: lap for lap in found}
    bars = [_bar(by_step.get(step), top, plot) for step in range(first, last + 1)]
    made: list[Line] = []
    for row in range(plot):
        cells = [bar[plot - 1 - row] if plot - 1 - row < len(bar) else (" ", "text") for bar in bars]
        label = Piece(labels.get(row, "").rjust(gutter - 1) + " ", "axis")
        made.append(fit((label, *from_cells(cells)), columns))
    right = f"{last:,}"
    axis = f"{first:,}".ljust(max(len(bars) - len(right), 0)) + right
    made.append(fit(line(Piece(" " * gutter + axis, "axis")), columns))
    return made


def _top(found: Sequence[Lap]) -> float:
    """Seconds at the top: of the longest step, but one far beyond the others runs out of the chart."""
    seconds = sorted(lap.seconds for lap in found)
    return min(seconds[-1], 2 * seconds[len(seconds) // 2]) or 1.0


def _bar(lap: Lap | None, top: float, rows: int) -> list[tuple[str, str]]:
    """Cells from below: letters in proportion to the seconds of each phase."""
    if lap is None or lap.seconds <= 0:
        return []
    counts = in_cells(
        [max(getattr(lap.phases, name), 0.0) for name, _ in PHASES], max(min(round(rows * lap.seconds / top), rows), 1)
    )
    return list(_letters(counts))


def _letters(counts: Iterable[int]) -> Iterable[tuple[str, str]]:
    for (_, letter), many in zip(PHASES, counts, strict=True):
        yield from [(letter, "phase_wait" if letter == "." else f"phase_{letter}")] * many
