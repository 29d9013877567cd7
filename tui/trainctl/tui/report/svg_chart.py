"""The charts of a report: loss, speed, efficiency and shares over the steps, with the interventions as marks; and each
as inline SVG: no script, no style of its own but classes, every mark with a title. Pure.
"""

import html
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainctl.protocol.messages import Series
from trainctl.tui.charts.axis import Axis, tick_labels, ticks, widened
from trainctl.tui.report.document import ChartLine, ChartMark, ReportChart
from trainctl.tui.report.run_facts import InterventionKind, RunFacts
from trainctl.tui.text.formatting import compact, percent
from trainctl.tui.text.styled_line import clean

NAMES: Final[dict[InterventionKind, str]] = {
    "command": "command",
    "split": "split",
    "settings": "settings",
    "membership": "membership",
    "rollback": "rollback",
    "state": "run state",
    "fault": "fault",
    "note": "note",
    "checkpoint": "checkpoint",
}
"""Kinds of interventions as a report calls them."""
MAX_NODES: Final = 8
"""Nodes with an area of their own in the chart of shares; those with fewer samples are one together."""

_EFFICIENCY: Final = (
    "Efficiency: the part of the ranks' time in steps that was spent computing: forward, backward and optimizer"
)


def loss_charts(facts: RunFacts) -> Iterator[ReportChart]:
    """Training and held-out loss; none without a step."""
    lines = [line for line in (_line("loss", facts.curves["loss"]), _held_out(facts)) if line.steps]
    if lines:
        unit = facts.view.loss_unit if facts.view is not None else ""
        yield ReportChart("Loss", unit, tuple(lines), _last(facts), _chart_marks(facts))
    rate = _line("learning rate", facts.curves["learning_rate"])
    if rate.steps:
        yield ReportChart("Learning rate", "", (rate,), _last(facts))


def speed_charts(facts: RunFacts) -> Iterator[ReportChart]:
    """Yield the run's rate, and the part of the time in which ranks computed."""
    metric = facts.view.rate_metric if facts.view is not None else "tokens_per_second"
    unit = facts.view.rate_unit if facts.view is not None else "tokens/s"
    rate = _line(unit, facts.curves[metric])
    if rate.steps:
        yield ReportChart("Rate", unit, (rate,), _last(facts), _chart_marks(facts))
    if facts.efficiency_curve:
        steps, values = zip(*facts.efficiency_curve, strict=True)
        apart = min((after - before for before, after in itertools.pairwise(steps)), default=1)
        line = ChartLine("computing", steps, values, bucket_steps=apart)
        yield ReportChart(_EFFICIENCY, "", (line,), _last(facts), percent=True)


def share_charts(facts: RunFacts) -> Iterator[ReportChart]:
    """Samples of each step by rank; none if it has one rank alone."""
    totals: dict[str, int] = {}
    for share in facts.shares:
        for name, count in share.samples.items():
            totals[name] = totals.get(name, 0) + count
    if len(totals) < 2:
        return
    own = sorted(totals, key=lambda name: -totals[name])[:MAX_NODES]
    names = [name for name in totals if name in own]
    steps = tuple(one.step for one in facts.shares)
    lines = [ChartLine(name, steps, tuple(float(one.samples.get(name, 0)) for one in facts.shares)) for name in names]
    if len(totals) > len(names):
        rest = tuple(
            float(sum(count for name, count in one.samples.items() if name not in own)) for one in facts.shares
        )
        lines.append(ChartLine(f"{len(totals) - len(names)} others", steps, rest))
    yield ReportChart("Samples of each step", "samples", tuple(lines), _last(facts), stacked=True)


def _line(name: str, series: Series) -> ChartLine:
    """Return a series as a line, without extremes where a bucket is one step."""
    several = series.bucket_steps > 1
    low, high = (series.minimum, series.maximum) if several else ((), ())
    return ChartLine(name, series.steps, series.mean, low, high, series.bucket_steps)


def _held_out(facts: RunFacts) -> ChartLine:
    series = facts.curves["eval_loss"]
    return ChartLine("held-out loss", series.steps, series.mean, bucket_steps=series.bucket_steps, dots=True)


def _last(facts: RunFacts) -> int:
    return max(facts.last.step if facts.last is not None else 1, 2)


def _chart_marks(facts: RunFacts) -> tuple[ChartMark, ...]:
    return tuple(
        ChartMark(
            intervention.step,
            NAMES[intervention.kind],
            f"step {intervention.step:,}, {NAMES[intervention.kind]} by {intervention.by}: {intervention.text}",
        )
        for intervention in facts.interventions
    )


LETTERS: Final = {
    "command": "C",
    "split": "S",
    "settings": "L",
    "membership": "M",
    "rollback": "B",
    "run state": "R",
    "fault": "F",
    "note": "N",
    "checkpoint": "",
}
"""The letter above a mark; a checkpoint is a tick below the chart."""
COLORS: Final = 9
"""Classes c0 to c8 that lines have in turn."""
_LABELS_APART, _CELL, _ROW = 17.0, 7.0, 14.0
_MAX_TEXTS, _MAX_CHARACTERS = 6, 160
"""The most texts of marks that share a label."""


@dataclass(frozen=True)
class Size:
    """A drawing's size and the room around its plot, in units of its view box."""

    name: str
    width: int
    height: int
    left: int = 52
    right: int = 10
    top: int = 20
    bottom: int = 30


WIDE, NARROW = Size("wide", 860, 280), Size("narrow", 360, 240, left=48)
"""For a desktop and for a telephone: text has the same height in both."""


@dataclass(frozen=True)
class _Frame:
    """Positions of steps and values in a chart."""

    size: Size
    first: float
    last: float
    low: float
    high: float

    def x(self, step: float) -> float:
        room = self.size.width - self.size.left - self.size.right
        return self.size.left + room * (step - self.first) / (self.last - self.first)

    def y(self, value: float) -> float:
        room = self.size.height - self.size.top - self.size.bottom
        return self.size.height - self.size.bottom - room * (value - self.low) / (self.high - self.low)

    @property
    def floor(self) -> float:
        return float(self.size.height - self.size.bottom)


def svg(chart: ReportChart, size: Size, number: int) -> str:
    """Return the drawing. `number`: of the chart in its page, which makes the ids of its parts unique."""
    frame = _Frame(size, 1.0, float(chart.last_step), *_range(chart))
    name = f"{size.name}{number}"
    box = f'<rect x="{size.left}" y="{size.top}" width="{size.width - size.left - size.right}" height="{frame.floor - size.top:g}"/>'  # noqa: E501
    title = f"{chart.title}{f' in {chart.unit}' if chart.unit else ''}, by step"
    parts = [
        f'<svg class="{size.name}" role="img" viewBox="0 0 {size.width} {size.height}" aria-labelledby="{name}t">',
        f'<title id="{name}t">{html.escape(title)}</title>',
        f'<clipPath id="{name}c">{box}</clipPath>',
        *_axes(chart, frame),
        f'<g clip-path="url(#{name}c)">',
        *(_areas(chart, frame) if chart.stacked else _lines(chart, frame)),
        "</g>",
        *_marks(chart.marks, frame),
        "</svg>",
    ]
    return "\n".join(parts)


def _range(chart: ReportChart) -> tuple[float, float]:
    """Return the range of the means: a single extreme value doesn't flatten the rest."""
    if chart.percent:
        return 0.0, 1.0
    if chart.stacked:
        return 0.0, max((sum(values) for values in zip(*(one.values for one in chart.lines), strict=True)), default=1.0)
    values = [value for line in chart.lines for value in line.values]
    return widened(min(values), max(values))


def _axes(chart: ReportChart, frame: _Frame) -> Iterator[str]:
    size, end = frame.size, frame.size.width - frame.size.right
    for value, text in tick_labels(frame.low, frame.high, round(size.height / _ROW / 1.5)).items():
        y = frame.y(value)
        words = percent(value) if chart.percent else compact(value) if frame.high >= 10_000 else text
        yield f'<path class="grid" d="M{size.left} {y:.1f}H{end}"/>'
        yield f'<text x="{size.left - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
    for x, text in ticks(Axis(), frame.first, frame.last, round((end - size.left) / _CELL), None):
        at = frame.x(x)
        anchor = "end" if at > end - 20 else "middle"
        yield f'<path class="axis" d="M{at:.1f} {frame.floor:g}v4"/>'
        yield f'<text x="{at:.1f}" y="{size.height - 6}" text-anchor="{anchor}">{text}</text>'
    yield f'<path class="axis" d="M{size.left} {frame.floor:g}H{end}"/>'


def _lines(chart: ReportChart, frame: _Frame) -> Iterator[str]:
    for number, one in enumerate(chart.lines):
        color = f"c{number % COLORS}"
        if one.low:
            yield f'<path class="band {color}" d="{_band(one, frame)}"/>'
        yield f'<path class="line {color}" d="{_path(one, frame)}"/>'
        if one.dots:
            yield from (
                f'<circle class="{color}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="2.5"/>'
                for step, value in zip(one.steps, one.values, strict=True)
            )


def _path(line: ChartLine, frame: _Frame) -> str:
    """Broken where steps are missing, but for a line of few values."""
    parts, before = [], None
    for step, value in zip(line.steps, line.values, strict=True):
        goes_on = before is not None and (line.dots or step - before <= 2 * line.bucket_steps)
        parts.append(f"{'L' if goes_on else 'M'}{frame.x(max(step, 1)):.1f} {frame.y(value):.1f}")
        before = step
    return "".join(parts)


def _band(line: ChartLine, frame: _Frame) -> str:
    xs = [frame.x(max(step, 1)) for step in line.steps]
    over = [f"{x:.1f} {_within(frame.y(value), frame):.1f}" for x, value in zip(xs, line.high, strict=True)]
    under = [f"{x:.1f} {_within(frame.y(value), frame):.1f}" for x, value in zip(xs, line.low, strict=True)]
    return f"M{'L'.join([*over, *under[::-1]])}Z"


def _within(y: float, frame: _Frame) -> float:
    """Coordinates far outside the drawing only take room."""
    return min(max(y, -frame.size.height), 2.0 * frame.size.height)


def _areas(chart: ReportChart, frame: _Frame) -> Iterator[str]:
    """Yield each line's area on top of those before it, its edge constant from one change to the next."""
    floor = [0.0] * len(chart.lines[0].steps)
    for number, one in enumerate(chart.lines):
        top = [below + value for below, value in zip(floor, one.values, strict=True)]
        edges = [frame.x(step) for step in (*one.steps, chart.last_step)]
        upper = _stairs(edges, [frame.y(value) for value in top])
        lower = _stairs(edges, [frame.y(value) for value in floor])
        yield (
            f'<path class="area c{number % COLORS}" d="M{"L".join([*upper, *lower[::-1]])}Z">'
            f"<title>{html.escape(clean(one.name))}</title></path>"
        )
        floor = top


def _stairs(edges: Sequence[float], ys: Sequence[float]) -> list[str]:
    return [f"{x:.1f} {y:.1f}" for at, y in enumerate(ys) for x in edges[at : at + 2]]


# ---------------------------------------------------------------- marks


def _marks(marks: Sequence[ChartMark], frame: _Frame) -> Iterator[str]:
    for group in _grouped([mark for mark in marks if LETTERS[mark.kind]], frame):
        steps = dict.fromkeys(f"{frame.x(max(mark.step, 1)):.0f}" for mark in group)
        lines = "".join(f"M{x} {frame.size.top}V{frame.floor:g}" for x in steps)
        first = next(iter(steps))
        yield (
            f'<g class="mark"><title>{_texts(group)}</title><path d="{lines}"/>'
            f'<text x="{first}" y="{frame.size.top - 6}" text-anchor="middle">{_label(group)}</text></g>'
        )
    for group in _grouped([mark for mark in marks if not LETTERS[mark.kind]], frame):
        ticks_at = dict.fromkeys(f"{frame.x(max(mark.step, 1)):.0f}" for mark in group)
        path = "".join(f"M{x} {frame.floor:g}v8" for x in ticks_at)
        yield f'<g class="saved"><title>{_texts(group)}</title><path d="{path}"/></g>'


def _grouped(marks: Sequence[ChartMark], frame: _Frame) -> list[list[ChartMark]]:
    """Return those whose labels would touch, together."""
    groups: list[list[ChartMark]] = []
    for mark in sorted(marks, key=lambda one: one.step):
        near = groups and frame.x(mark.step) - frame.x(groups[-1][0].step) < _LABELS_APART
        if near:
            groups[-1].append(mark)
        else:
            groups.append([mark])
    return groups


def _label(group: Sequence[ChartMark]) -> str:
    """Return the letter of its kind, or how many there are of several kinds."""
    kinds = {mark.kind for mark in group}
    return LETTERS[group[0].kind] if len(kinds) == 1 else str(len(group)) if len(group) < 100 else "+"


def _texts(group: Sequence[ChartMark]) -> str:
    said = [clean(mark.text) for mark in group[:_MAX_TEXTS]]
    cut = [text if len(text) <= _MAX_CHARACTERS else f"{text[:_MAX_CHARACTERS]}…" for text in said]
    more = [f"and {len(group) - _MAX_TEXTS:,} more"] if len(group) > _MAX_TEXTS else []
    return html.escape("\n".join([*cut, *more]))
