"""A report as parts that every form has: sections of tables, charts, texts and quotes. Plain values."""

from typing import NamedTuple


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
