"""A report as parts that every form has: sections of tables, charts, texts and quotes; and as Markdown."""

import bisect
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from trainctl.tui.text import formatting as f
from trainctl.tui.text.styled_line import clean


class ReportTable(NamedTuple):
    """Rows of texts under a head. `right`: columns of numbers, from 0; `left_out`: rows that there were besides."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    right: tuple[int, ...] = ()
    left_out: int = 0
    folded: bool = False  # shown on demand, where a form can


class ChartLine(NamedTuple):
    """One line of a chart, ascending in steps; `low` and `high`: extremes of each bucket, empty if there are none."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    bucket_steps: int = 1
    dots: bool = False  # few values, each with a dot


class ChartMark(NamedTuple):
    """Something that happened at a step."""

    step: int
    kind: str
    text: str


class ReportChart(NamedTuple):
    """Lines over the same steps. `stacked`: areas on top of each other, constant from one step to the next."""

    title: str
    unit: str
    lines: tuple[ChartLine, ...]
    last_step: int
    marks: tuple[ChartMark, ...] = ()
    stacked: bool = False
    percent: bool = False  # values are parts of one


class ReportText(NamedTuple):
    """A paragraph."""

    text: str


class Quotation(NamedTuple):
    """Text of a model or a user, with what it is."""

    label: str
    text: str


Block = ReportTable | ReportChart | ReportText | Quotation


class ReportSection(NamedTuple):
    """A part of a report under a heading."""

    title: str
    blocks: tuple[Block, ...]


class ReportPage(NamedTuple):
    """A whole report."""

    title: str
    sections: tuple[ReportSection, ...]


POINTS: Final = 20
"""Values of a chart."""
_MARKUP: Final = re.compile(r"[\\`*|<]|(?<!\w)_|_(?!\w)|\](?=\()|^[#>]")
"""What would be read as markup."""


def page_markdown(page: ReportPage) -> str:
    """The whole page."""
    made = [f"# {_text(page.title)}", ""]
    for section in page.sections:
        made += [f"## {_text(section.title)}", ""]
        for block in section.blocks:
            made += [*_block(block), ""]
    return "\n".join(made)


def _text(text: str) -> str:
    """On one line, and nothing in it is markup."""
    return _MARKUP.sub(r"\\\g<0>", clean(text))


def _block(block: Block) -> Iterator[str]:
    match block:
        case ReportTable():
            yield from _table(block)
        case ReportChart():
            yield from _chart(block)
        case ReportText(text):
            yield _text(text)
        case Quotation(label, text):
            yield from [f"{_text(label)}:", ""]
            yield from (f">     {clean(line)}".rstrip() for line in text.splitlines() or [""])


def _table(table: ReportTable) -> Iterator[str]:
    if table.title:
        yield from [f"### {_text(table.title)}", ""]
    yield f"| {' | '.join(map(_text, table.head))} |"
    yield f"| {' | '.join('---:' if at in table.right else '---' for at in range(len(table.head)))} |"
    yield from (f"| {' | '.join(map(_text, row))} |" for row in table.rows)
    if table.left_out:
        yield from ["", f"{table.left_out:,} rows between the first and the last ones are left out."]


def _chart(chart: ReportChart) -> Iterator[str]:
    if chart.stacked:
        return  # the table below it has the same values
    steps = sorted({step for one in chart.lines for step in one.steps})
    places = range(min(POINTS, len(steps)))
    chosen = [steps[round(at * (len(steps) - 1) / max(len(places) - 1, 1))] for at in places]
    rows = tuple((f"{step:,}", *(_at(one, step, chart) for one in chart.lines)) for step in chosen)
    unit = f" in {chart.unit}" if chart.unit else ""
    head = ("from step", *(one.name for one in chart.lines))
    yield from _table(ReportTable(head, rows, f"{chart.title}{unit}", tuple(range(len(head)))))


def _at(one: ChartLine, step: int, chart: ReportChart) -> str:
    """The value of the newest bucket up to a step; empty before the first."""
    place = bisect.bisect_right(one.steps, step) - 1
    if place < 0:
        return ""
    return f.percent(one.values[place]) if chart.percent else f"{one.values[place]:.6g}"
