"""A report as one HTML page: inline SVG and style, no script, nothing from elsewhere; light and dark. Pure."""

import html
import itertools
import re
from collections.abc import Iterator, Mapping
from typing import Final

from trainctl.tui.report.document import (
    Block,
    Quotation,
    ReportChart,
    ReportPage,
    ReportSection,
    ReportTable,
    ReportText,
)
from trainctl.tui.report.svg_chart import COLORS, LETTERS, NARROW, WIDE, svg
from trainctl.tui.text.styled_line import clean

LIGHT: Final[Mapping[str, str]] = {
    "page": "#ffffff",
    "text": "#1b1f24",
    "dim": "#57606a",
    "edge": "#d0d7de",
    "head": "#f3f5f7",
    "mark": "#6e3fa3",
    "saved": "#57606a",
    "c0": "#0b5cad",
    "c1": "#b3400a",
    "c2": "#0a7a4f",
    "c3": "#8a2f7d",
    "c4": "#7a6000",
    "c5": "#00707f",
    "c6": "#a5283a",
    "c7": "#4c56b8",
    "c8": "#57606a",
}
DARK: Final[Mapping[str, str]] = {
    "page": "#14171b",
    "text": "#e6e9ed",
    "dim": "#a3adb8",
    "edge": "#3b434c",
    "head": "#1e2329",
    "mark": "#c9a6f0",
    "saved": "#a3adb8",
    "c0": "#6cb2ff",
    "c1": "#ff9e64",
    "c2": "#5fd3a2",
    "c3": "#e29bdb",
    "c4": "#e0c060",
    "c5": "#5fd0de",
    "c6": "#ff8e9b",
    "c7": "#a9b1ff",
    "c8": "#a3adb8",
}
"""Colours of both schemes; c0 to c8 are those of lines."""
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC")
_STYLE: Final = """
*{box-sizing:border-box}
body{margin:0 auto;max-width:60rem;padding:1rem;background:var(--page);color:var(--text);
font:15px/1.5 system-ui,sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;margin:.5rem 0}h2{font-size:1.2rem;margin:2rem 0 .5rem;border-bottom:1px solid var(--edge)}
h3,summary{font-size:1rem;font-weight:600;margin:1rem 0 .3rem}
nav a{color:var(--c0);margin-right:.8rem;display:inline-block}
figure{margin:1rem 0}figcaption{font-weight:600}
.scroll{overflow-x:auto;margin-bottom:.8rem}
table{border-collapse:collapse;font-size:.87rem}
th,td{text-align:left;vertical-align:top;padding:.2rem .6rem;border-bottom:1px solid var(--edge);min-width:4.5rem;
max-width:34rem;overflow-wrap:break-word}
td.t{min-width:7.5rem}
th{background:var(--head)}.r{text-align:right;font-variant-numeric:tabular-nums}
blockquote{margin:.3rem 0 .8rem;padding:.3rem .8rem;border-left:3px solid var(--edge);white-space:pre-wrap}
.dim{color:var(--dim);font-size:.87rem}
svg{width:100%;height:auto;display:block}svg.narrow{display:none}
svg text{fill:var(--dim);font:11px system-ui,sans-serif}
.grid{stroke:var(--edge);fill:none}.axis{stroke:var(--dim);fill:none}
.line{fill:none;stroke-width:1.5}.band{stroke:none;fill-opacity:.18}.area{fill-opacity:.75;stroke:var(--page)}
.mark path{stroke:var(--mark);stroke-dasharray:2 3;fill:none}.mark text{fill:var(--mark);font-weight:600}
.saved path{stroke:var(--saved);fill:none}
ul.legend{list-style:none;margin:.3rem 0;padding:0;font-size:.87rem}ul.legend li{display:inline-block;margin-right:1rem}
ul.legend i{display:inline-block;width:.8rem;height:.8rem;margin-right:.3rem;background:currentColor}
ul.legend b{color:var(--mark);margin-right:.3rem}
@media (max-width:40rem){svg.wide{display:none}svg.narrow{display:block}th,td{padding:.2rem .4rem;max-width:55vw}
.log,.log tbody{display:block}.log tr{display:flex;flex-wrap:wrap;border-bottom:1px solid var(--edge)}
.log th,.log td{border:0;min-width:0;max-width:100%}td.t{white-space:nowrap}.log tr:has(th){background:var(--head)}}
@media print{svg.narrow{display:none}svg.wide{display:block}}
"""


def page_html(page: ReportPage) -> str:
    """Return the whole page."""
    numbers = itertools.count(1)
    links = " ".join(f'<a href="#{_id(section)}">{_text(section.title)}</a>' for section in page.sections)
    body = "\n".join(_section(one, numbers) for one in page.sections)
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en">',
            "<head>",
            '<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{_text(page.title)}</title>",
            f"<style>{_styles()}</style>",
            "</head>",
            "<body>",
            f"<h1>{_text(page.title)}</h1>",
            f"<nav>{links}</nav>",
            body,
            "</body>",
            "</html>",
            "",
        ]
    )


def _styles() -> str:
    lines = "".join(
        f".line.c{at}{{stroke:var(--c{at})}}.band.c{at},.area.c{at},circle.c{at}{{fill:var(--c{at})}}"
        f"i.c{at}{{color:var(--c{at})}}"
        for at in range(COLORS)
    )
    dark = f"@media (prefers-color-scheme:dark){{:root{{{_variables(DARK)}}}}}"
    return f":root{{{_variables(LIGHT)}}}{dark}{_STYLE}{lines}"


def _variables(colors: Mapping[str, str]) -> str:
    return "".join(f"--{name}:{color};" for name, color in colors.items())


def _text(text: str) -> str:
    return html.escape(clean(text))


def _id(section: ReportSection) -> str:
    return section.title.lower().replace(" ", "-")


def _section(section: ReportSection, numbers: Iterator[int]) -> str:
    blocks = "\n".join(_block(block, numbers) for block in section.blocks)
    return f'<section id="{_id(section)}">\n<h2>{_text(section.title)}</h2>\n{blocks}\n</section>'


def _block(block: Block, numbers: Iterator[int]) -> str:
    match block:
        case ReportTable():
            return _table(block)
        case ReportChart():
            return _figure(block, next(numbers))
        case ReportText(text):
            return f"<p>{_text(text)}</p>"
        case Quotation(label, text):
            lines = "\n".join(_text(line) for line in text.splitlines())
            return f'<div class="dim">{_text(label)}</div>\n<blockquote>{lines}</blockquote>'


def _table(table: ReportTable) -> str:
    """Return a table. On a narrow screen, what is listed by step takes as many lines as its texts need, instead of a
    scroll bar."""
    head = "".join(f"<th{_side(table, at)}>{_text(name)}</th>" for at, name in enumerate(table.head))
    rows = "\n".join(
        f"<tr>{''.join(f'<td{_side(table, at, cell)}>{_text(cell)}</td>' for at, cell in enumerate(row))}</tr>"
        for row in table.rows
    )
    kind = ' class="log"' if table.head[0] == "step" else ""
    made = f'<div class="scroll"><table{kind}>{f"<tr>{head}</tr>" if any(table.head) else ""}\n{rows}\n</table></div>'
    if table.left_out:
        made += f'\n<p class="dim">{table.left_out:,} rows between the first and the last ones are left out.</p>'
    if table.folded:
        return f"<details><summary>{_text(table.title)}</summary>{made}</details>"
    return f"<h3>{_text(table.title)}</h3>{made}" if table.title else made


def _side(table: ReportTable, column: int, cell: str = "") -> str:
    """Numbers are at the right; a time is two lines at most, the date and the hour."""
    if column in table.right:
        return ' class="r"'
    return ' class="t"' if _TIME.fullmatch(cell) else ""


def _figure(chart: ReportChart, number: int) -> str:
    unit = f' <span class="dim">{_text(chart.unit)}</span>' if chart.unit else ""
    drawn = "\n".join(svg(chart, size, number) for size in (WIDE, NARROW))
    return f"<figure><figcaption>{_text(chart.title)}{unit}</figcaption>\n{drawn}\n{_legend(chart)}</figure>"


def _legend(chart: ReportChart) -> str:
    lines = [
        f'<li><i class="c{at % COLORS}"></i>{_text(one.name)}</li>'
        for at, one in enumerate(chart.lines)
        if len(chart.lines) > 1
    ]
    kinds = [mark.kind for mark in chart.marks]
    marks = [
        f"<li>{f'<b>{letter}</b>' if letter else '<b>tick below</b>'}{kind} ({kinds.count(kind):,})</li>"
        for kind, letter in LETTERS.items()
        if kind in kinds
    ]
    return f'<ul class="legend">{"".join([*lines, *marks])}</ul>' if lines or marks else ""
