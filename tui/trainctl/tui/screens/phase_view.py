"""Where each of a rank's last steps went, as a table and as columns of phase letters."""

from collections.abc import Sequence

from trainctl.tui.charts.viewport import page
from trainctl.tui.state.step_phases import MEAN_STEPS, StepPhases, means
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, fit, from_cells, line
from trainctl.tui.widgets.inline_bars import BAR_PHASES, in_cells


def table(found: Sequence[StepPhases], columns: int, rows: int, glyphs: Glyphs) -> list[Line]:
    """Each phase's letter, name, mean and part of the step, in exactly `rows` lines."""
    mean = means(found)
    whole = sum(mean.values())
    made = []
    for name, letter, role in BAR_PHASES:
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


def stacked(found: Sequence[StepPhases], newest: int, columns: int, rows: int) -> list[Line]:
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


def _top(found: Sequence[StepPhases]) -> float:
    """Seconds at the top: of the longest step, but one far beyond the others runs out of the chart."""
    seconds = sorted(lap.seconds for lap in found)
    return min(seconds[-1], 2 * seconds[len(seconds) // 2]) or 1.0


def _bar(lap: StepPhases | None, top: float, rows: int) -> list[tuple[str, str]]:
    """Cells from below: letters in proportion to the seconds of each phase."""
    if lap is None or lap.seconds <= 0:
        return []
    seconds = [max(getattr(lap.phases, name), 0.0) for name, *_ in BAR_PHASES]
    counts = in_cells(seconds, max(min(round(rows * lap.seconds / top), rows), 1))
    return [(letter, role) for (_, letter, role), many in zip(BAR_PHASES, counts, strict=True) for _ in range(many)]
