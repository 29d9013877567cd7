"""A report as parts that every form has: sections of tables, charts, texts and quotes; and as Markdown."""

import bisect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainctl.tui.text import formatting
from trainctl.tui.text.styled_line import clean


@dataclass(frozen=True)
class ReportTable:
    """Rows of texts under a head. `right`: columns of numbers, from 0; `left_out`: rows that there were besides."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    title: str = ""
    right: tuple[int, ...] = ()
    left_out: int = 0
    folded: bool = False  # shown on demand, where a form can


@dataclass(frozen=True)
class ChartLine:
    """One line of a chart, ascending in steps; `low` and `high`: extremes of each bucket, empty if there are none."""

    name: str
    steps: tuple[int, ...]
    values: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    bucket_steps: int = 1
    dots: bool = False  # few values, each with a dot


@dataclass(frozen=True)
class ChartMark:
    """Something that happened at a step."""

    step: int
    kind: str
    text: str


@dataclass(frozen=True)
class ReportChart:
    """Lines over the same steps. `stacked`: areas on top of each other, constant from one step to the next."""

    title: str
    unit: str
    lines: tuple[ChartLine, ...]
    last_step: int
    marks: tuple[ChartMark, ...] = ()
    stacked: bool = False
    percent: bool = False  # values are parts of one


@dataclass(frozen=True)
class ReportText:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Quotation:
    """Text of a model or a user, with what it is."""

    label: str
    text: str


Block = ReportTable | ReportChart | ReportText | Quotation


@dataclass(frozen=True)
class ReportSection:
    """A part of a report under a heading."""

    title: str
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class ReportPage:
    """A whole report."""

    title: str
    sections: tuple[ReportSection, ...]


POINTS: Final = 20
"""Values of a chart."""
_MARKUP: Final = re.compile(r"[\\`*|<]|(?<!\w)_|_(?!\w)|\](?=\()|^[#>]")
"""Characters that would be read as markup."""


def page_markdown(page: ReportPage) -> str:
    """Return the whole page."""
    made = [f"# {_text(page.title)}", ""]
    for section in page.sections:
        made += [f"## {_text(section.title)}", ""]
        for block in section.blocks:
            made += [*_block(block), ""]
    return "\n".join(made)


def _text(text: str) -> str:
    """Return the text on one line, with nothing in it that is markup."""
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
    steps = sorted({step for line in chart.lines for step in line.steps})
    places = range(min(POINTS, len(steps)))
    chosen = [steps[round(at * (len(steps) - 1) / max(len(places) - 1, 1))] for at in places]
    rows = tuple((f"{step:,}", *(_at(one, step, chart) for one in chart.lines)) for step in chosen)
    unit = f" in {chart.unit}" if chart.unit else ""
    head = ("from step", *(one.name for one in chart.lines))
    yield from _table(ReportTable(head, rows, f"{chart.title}{unit}", tuple(range(len(head)))))


def _at(line: ChartLine, step: int, chart: ReportChart) -> str:
    """Return the value of the newest bucket up to a step; empty before the first."""
    place = bisect.bisect_right(line.steps, step) - 1
    if place < 0:
        return ""
    return formatting.percent(line.values[place]) if chart.percent else f"{line.values[place]:.6g}"
