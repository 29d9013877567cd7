"""A report as Markdown: the tables of the page, and each chart as a table of about twenty of its values. Pure."""

import bisect
import re
from collections.abc import Iterator
from typing import Final

from trainctl.tui.report.document import (
    Block,
    ChartLine,
    Quotation,
    ReportChart,
    ReportPage,
    ReportTable,
    ReportText,
)
from trainctl.tui.text import formatting as f
from trainctl.tui.text.styled_line import clean

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
