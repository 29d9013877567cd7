"""The dot canvas and the panels round it: no spike lost, gaps empty, what isn't finite marked, any size drawn."""

import dataclasses
import itertools
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.tui.charts.axis import tick_labels, widened
from trainctl.tui.charts.canvas import Canvas, Curve, Frame, extents
from trainctl.tui.charts.marks import Mark
from trainctl.tui.charts.plot import Plot, draw_panel
from trainctl.tui.charts.traces import Trace
from trainctl.tui.charts.viewport import page, window_end
from trainctl.tui.state import series as s
from trainctl.tui.state.run_events import Change
from trainctl.tui.text import styled_line as ln


def curve(values: list[float], span: float = 1.0) -> Curve:
    array = np.array(values, float)
    return Curve(np.arange(1, len(values) + 1) * span, array, array, span, "series0")


def window(values: dict[int, float]) -> s.Window:
    made = s.empty()
    for step, value in values.items():
        made = s.add(made, step, value)
    return made


def dots(canvas: Canvas) -> set[tuple[int, int]]:
    """(row, column) of every dot, read back from the characters."""
    found = set()
    places = ((row, column) for column in range(2) for row in range(4))
    bits = dict(zip((0x01, 0x02, 0x04, 0x40, 0x08, 0x10, 0x20, 0x80), places, strict=True))
    for row, pieces in enumerate(canvas.lines()):
        for column, char in enumerate(ln.plain(pieces)):
            code = ord(char) - 0x2800 if char >= "\u2800" else 0
            found |= {(4 * row + y, 2 * column + x) for bit, (y, x) in bits.items() if code & bit}
    return found


def text(panel: Plot, columns: int, rows: int) -> list[str]:
    return [ln.plain(row) for row in draw_panel(panel, columns, rows)[0]]


def test_a_rising_line_draws_the_diagonal() -> None:
    frame = Frame(1, 9, 0.5, 8.5, 4, 2)
    canvas = Canvas(frame)
    canvas.stroke(curve([1, 2, 3, 4, 5, 6, 7, 8]))
    assert dots(canvas) == {(7 - step, step) for step in range(8)}


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=400), st.integers(1, 40), st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_every_value_has_its_dot(values: list[float], columns: int, rows: int) -> None:
    low, high = widened(min(values), max(values))
    frame = Frame(1, len(values) + 1, low, high, columns, rows)
    canvas = Canvas(frame)
    canvas.stroke(curve(values))
    (lows,), (highs,), _ = extents([curve(values)], frame)
    width = frame.dots[0]
    for index, value in enumerate(values):
        column = int(index * width / len(values) + 1e-9)
        assert lows[column] <= value <= highs[column]
    rows_made = canvas.lines()
    assert len(rows_made) == rows
    assert {ln.width(pieces) for pieces in rows_made} == {columns}


def test_curves_drawn_together_are_those_drawn_one_after_another() -> None:
    frame = Frame(1, 41, 0.0, 10.0, 20, 5)
    curves = [
        Curve(np.arange(1.0, 41, 1 + place % 3), *2 * (np.abs(np.sin(np.arange(1.0, 41, 1 + place % 3) * place)) * 9,),
              1 + place % 3, f"series{place}")
        for place in range(20)
    ]  # fmt: skip
    together, apart = Canvas(frame), Canvas(frame)
    together.stroke(*curves)
    for item in curves:
        apart.stroke(item)
    assert together.lines() == apart.lines()
    assert {piece.role for pieces in together.lines() for piece in pieces} > {"series19", "series18"}


def test_buckets_wider_than_a_column_are_joined() -> None:
    frame = Frame(1, 4, 0, 4, 30, 4)
    canvas = Canvas(frame)
    canvas.stroke(curve([1, 2, 3]))
    assert {column for _, column in dots(canvas)} >= set(range(41))


def of_changes(*marks: Mark | Change, title: str = "loss") -> Plot:
    made = window({step: 1.0 + step for step in range(1, 101)})
    return Plot(title, (Trace(made, "", "series0"),), 1, 100, marks=marks)


@given(st.lists(st.integers(-5, 120), max_size=12), st.lists(st.integers(-5, 120), max_size=9), st.integers(12, 80))
@settings(max_examples=60, deadline=None)
def test_no_two_labels_of_the_rule_meet(changed: list[int], commands: list[int], columns: int) -> None:
    marks = [Mark(step, str(index % 9 + 1)) for index, step in enumerate(sorted(commands))]
    panel = of_changes(*marks, *(Change(step, f"g1.{index + 2}") for index, step in enumerate(sorted(changed))))
    labels = [(at, len(text)) for at, text, role in draw_panel(panel, columns, 8)[1] if role == "label"]
    numbers = [at for at, _, role in draw_panel(panel, columns, 8)[1] if role == "mark"]
    ends = sorted(labels)
    assert all(at + size < after for (at, size), (after, _) in itertools.pairwise(ends))
    assert not any(at - 1 <= number <= at + size for at, size in labels for number in numbers)
    assert all(at + size <= columns for at, size in labels)


def test_the_axis_jumps_rather_than_scrolls() -> None:
    ends = [window_end(step, 10_000) for step in range(1, 2001)]
    assert all(end >= step for step, end in enumerate(ends, 1))
    assert len(set(ends)) < 40
    assert all(step >= 0.8 * end for step, end in enumerate(ends[1:], 2))
    assert window_end(0, 10_000) == window_end(1, 10_000) == 2
    assert window_end(149, 150) == 150
    pages = {page(step, 240) for step in range(1, 1000)}
    assert len(pages) < 16
    assert all(last - first == 239 for first, last in pages)


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(1, 30))
def test_ticks_are_inside_and_distinct(low: float, size: float, rows: int) -> None:
    low, high = widened(low, low + size)
    ticks = tick_labels(low, high, rows)
    assert all(low <= tick <= high for tick in ticks)
    assert 0 < len(ticks) <= 12
    assert all(ticks.values())


def test_a_first_step_of_twenty_seconds_leaves_the_others_their_room_and_says_its_number() -> None:
    values = window({1: 20.25, **{step: 1.0 + 0.2 * math.sin(step) for step in range(2, 100)}})
    clipped = text(Plot("step", (Trace(values, "studio", "series0"),), 1, 120, max_times=4.0), 60, 10)
    assert "20.2" in clipped[0]
    assert any(ord(char) > 0x2800 for char in clipped[0]), "it reaches the top"
    drawn = [row for row in clipped[:-1] if any(ord(char) > 0x2800 for char in row[12:])]
    assert len(drawn) >= 3, "what varies has more than one line of dots"
    flat = text(Plot("step", (Trace(values, "studio", "series0"),), 1, 120), 60, 10)
    assert "20.2" not in flat[0]
    calm = window(dict.fromkeys(range(1, 100), 1.0))
    panel = Plot("step", (Trace(calm, "studio", "series0"),), 1, 120)
    assert text(dataclasses.replace(panel, max_times=4.0), 60, 10) == text(panel, 60, 10)
