"""Charts as lines: every spike is in them at any zoom, gaps and pauses stay gaps, and the crosshair reads true."""

import dataclasses
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.plotted import VIEW, state_of
from tests.tui.support.recorded import history_of

from trainctl.protocol import messages as m
from trainctl.tui.charts import history
from trainctl.tui.charts import viewport as vw
from trainctl.tui.charts.axis import Axis, Scale
from trainctl.tui.charts.marks import Mark
from trainctl.tui.charts.plot import Plot, draw_plot, plot_margins, prepare
from trainctl.tui.charts.traces import Trace, reading, shape
from trainctl.tui.charts.viewport import ChartView, Extent, Pick
from trainctl.tui.state import reducer
from trainctl.tui.state import series as s
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.ascii import in_same_cells


def window(values: dict[int, float], capacity: int = 4096) -> s.Window:
    made = s.empty(capacity)
    for step, value in values.items():
        made = s.add(made, step, value)
    return made


def flat(steps: int, spike_at: int, spike: float, bucket_steps: int) -> s.Window:
    """A window of ones with one spike, in buckets of a size."""
    first = np.arange(0, steps + 1, bucket_steps)
    place = spike_at // bucket_steps
    maximum, total = np.ones(len(first)), np.full(len(first), float(bucket_steps))
    maximum[place], total[place] = spike, bucket_steps - 1 + spike
    count = np.full(len(first), float(bucket_steps))
    ones = np.ones(len(first))
    return s.Window(bucket_steps, first, ones, maximum, total, count, ones, np.zeros(len(first), np.int64), len(first))


def of(trace: s.Window, first: float, last: float, **other: object) -> Plot:
    return Plot("loss", (Trace(trace, "", "series0"),), first, last, **other)  # type: ignore[arg-type]


def text(plot: Plot, columns: int, rows: int) -> list[str]:
    return [ln.plain(row) for row in draw_plot(plot, columns, rows)[0]]


def is_dot(char: str) -> bool:
    return "\u2801" <= char <= "\u28ff"


@given(
    st.integers(1, 100_000),
    st.sampled_from([1, 7, 100]),
    st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=12),
    st.integers(30, 140),
    st.booleans(),
    st.sampled_from([0.0, 50.0]),
)
@settings(max_examples=60, deadline=None)
def test_no_spike_is_lost_at_any_zoom(
    spike_at: int, size: int, zooms: list[tuple[bool, float]], columns: int, log: bool, half_life: float
) -> None:
    values = flat(100_000, spike_at, 50.0, size)
    place = Extent(100_000, live=False, columns=columns)
    view = ChartView((vw.Chart((Pick("loss"),)),))
    for inwards, part in zooms:
        view = vw.zoomed(view, 0.5 if inwards else 2.0, place, vw.step_at(view, part, place))
    first, last = vw.shown(view, place)
    plot = of(values, first, last, scale=Scale(log), half_life_steps=half_life)
    made = prepare(plot, 12)
    bucket = spike_at // size * size
    if bucket + size > first and bucket < last + 1:
        assert made.span[1] >= Scale(log).place(np.array([50.0]))[0]
        rows = text(plot, columns, 12)
        assert any(is_dot(char) for row in rows[:2] for char in row)
    else:
        assert made.span[1] < 2.0


@given(st.integers(2, 400), st.integers(1, 300), st.integers(30, 120), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gaps_stay_gaps(start: int, size: int, columns: int, smoothed: bool) -> None:
    steps = [*range(1, start), *range(start + size, start + size + 300)]
    plot = of(window(dict.fromkeys(steps, 1.0)), 1, steps[-1], half_life_steps=20.0 if smoothed else 0.0)
    made = prepare(plot, 8)
    left = plot_margins(plot, made, columns).left
    wide = (columns - left) / steps[-1]
    rows = text(plot, columns, 8)[:-1]
    for column in range(math.ceil((start - 1) * wide) + 1, math.floor((start + size - 1) * wide) - 1):
        assert not any(is_dot(row[left + column]) for row in rows)


def test_a_pause_is_a_gap_in_time_and_none_in_steps() -> None:
    steps = np.arange(1.0, 101.0)
    paused = Axis("time", steps, 1.7e9 + steps + np.where(steps > 50, 500.0, 0.0))
    values = window(dict.fromkeys(range(1, 101), 1.0))
    for axis, hole in ((paused, True), (Axis(), False)):
        x0, x1 = float(axis.to_x(1.0)), float(axis.to_x(101.0))
        made = shape(Trace(values, "", "series0", axis), x0, x1, Scale())
        assert made.joins.sum() == (98 if hole else 99)


def test_what_a_logarithm_has_no_place_for_is_marked_and_so_is_what_is_not_finite() -> None:
    values = window({1: 10.0, 2: 0.0, 3: 100.0, 4: math.nan, 5: 1000.0, 6: -1.0, **dict.fromkeys(range(7, 40), 5.0)})
    rows = text(of(values, 1, 40, scale=Scale(log=True)), 60, 8)
    assert rows[-2].count("↓") == 2
    assert rows[0].count("✕") == 1
    assert {"10", "100", "1000"} <= {row[:5].strip() for row in rows[:-1]}
    assert "↓" not in "".join(text(of(values, 1, 40), 60, 8))


@given(
    st.integers(0, 70),
    st.integers(0, 14),
    st.lists(st.floats(-1e9, 1e9), max_size=20),
    st.booleans(),
    st.sampled_from(["ab", "  "]),
    st.floats(0, 30),
)
@settings(max_examples=80, deadline=None)
def test_any_size_is_filled_exactly(
    columns: int, rows: int, values: list[float], log: bool, letters: str, crosshair: float
) -> None:
    made = window(dict(enumerate(values, 1)))
    traces = (
        Trace(made, "node", "series0", letter=letters[0].strip()),
        Trace(made, "other", "series1", points=True, letter=letters[1].strip()),
    )
    plot = Plot("loss", traces, 1, 32, scale=Scale(log), marks=(Mark(3, "1"),), crosshair=crosshair)
    drawn, _, _ = draw_plot(plot, columns, rows)
    assert len(drawn) == rows
    assert all(ln.width(row) == columns for row in drawn)
    texts = [ln.plain(row) for row in drawn]
    assert all(in_same_cells(row).isascii() and len(in_same_cells(row)) == len(row) for row in texts)


def test_a_reading_is_the_bucket_at_the_crosshair_and_nothing_in_a_gap() -> None:
    values = s.appended(flat(200, 15, 9.0, 10), window(dict.fromkeys(range(300, 310), 2.0)), 209)
    trace = Trace(values, "loss", "series0")
    found = reading(trace, 17.0)
    assert (found.first, found.last, found.minimum, found.maximum) == (10, 19, 1.0, 9.0)
    assert found.mean == pytest.approx(1.8)
    assert reading(trace, 250.0) is None
    points = Trace(window({50: 3.0, 100: 2.0}), "eval", "series1", points=True)
    last = reading(points, 99.0)
    assert last is not None and (last.first, last.mean) == (50, 3.0)
    assert reading(points, 10.0) is None


def test_what_comes_by_time_is_joined_and_read_over_the_steps_between_and_not_past_a_gap() -> None:
    """A reading a second, of ten steps a second; none came between steps 200 and 300."""
    steps = [step for step in range(1, 500, 10) if not 200 < step < 300]
    trace = Trace(window({step: float(step) for step in steps}), "", "series0", sparse=True)
    made = shape(trace, 1.0, 501.0, Scale())
    assert len(made.joins) - made.joins.sum() == 1
    held, lost = reading(trace, 108.0), reading(trace, 280.0)
    assert held is not None and (held.first, held.mean, lost) == (101, 101.0, None)
    assert reading(dataclasses.replace(trace, sparse=False), 108.0) is None


def test_live_readings_of_machines_follow_at_any_pace() -> None:
    """Between two readings are more steps than a state keeps parts of."""
    chart = vw.Chart((Pick("cpu_percent", vw.ALL_RANKS),))
    state, tails = state_of(1), dict[history.Key, s.Window]()
    answer = history.Answer(
        history.Ask(state.run.run, ("cpu_percent",), 1, state.run.step, 100, state.run.step),
        {("cpu_percent", 0): window({state.run.step - 9: 50.0})},
    )
    whole, part = state.run.step, state.parts[0][-1]
    for step in range(whole + 1, whole + 101):
        values = {"cpu_percent": float(step)} if step % 40 == 0 else {}
        part = msgspec.structs.replace(part, step=step, values=values)
        state = msgspec.structs.replace(state, parts={0: (*state.parts[0], part)[-reducer.RECENT_PARTS :]})
        tails = history.collected(tails, state, (chart,))
        assert not history.is_torn(answer, state, tails)
    found = history.window_of([answer], state, ("cpu_percent", 0), (1, whole + 100), tails)
    assert found.last.tolist() == [50.0, *(float(step) for step in range(whole + 1, whole + 101) if step % 40 == 0)]
    later = msgspec.structs.replace(part, step=whole + 200)
    state = msgspec.structs.replace(state, parts={0: (later,)})
    assert history.is_torn(answer, state, history.collected(tails, state, (chart,)))


def answered(run: m.RunView, view: ChartView, first: int, last: int, columns: int = 200) -> history.Answer:
    metrics = history.needed(view.charts)
    ask = history.ask_of(run.run, metrics, (first, last), run.step, columns)
    reply = m.History(rid="r", series=history_of(run, metrics, ask.first, ask.last, columns))
    return history.answer_of(ask, [reply])


def test_live_values_go_after_what_the_record_answered_and_a_hole_is_seen() -> None:
    state = state_of(1)
    run = state.run
    early = answered(run, VIEW, 1, 100)
    windowed = history.window_of([early], state, ("loss", None), (1, 118))
    assert windowed.newest_step == 118
    assert len(windowed) == 118
    assert not history.is_torn(early, state, {})
    later = msgspec.structs.replace(state, recent={("loss", None): window({130: 1.0, 131: 2.0})})
    assert history.is_torn(early, later, {})


@pytest.mark.parametrize("metric", ["grad_norm", "learning_rate"])
def test_what_no_snapshot_carries_is_drawn_from_the_run_s_beginning(metric: str) -> None:
    """The state's own window begins where the screen was attached; the record's answer is coarser and whole."""
    state = state_of(1)
    run = state.run
    last, view = run.step, ChartView((vw.Chart((Pick(metric),)),))
    whole = answered(run, view, 1, last, columns=40)
    attached, alone = window(dict.fromkeys(range(last - 20, last + 1), 0.5)), (metric, None)
    state = msgspec.structs.replace(state, windows={**state.windows, alone: attached}, recent={alone: attached})
    assert whole.windows[alone].bucket_steps > 1
    drawn = history.window_of([whole], state, alone, (1, last))
    assert drawn.first[0] <= whole.windows[alone].bucket_steps
    assert history.window_of([whole], state, alone, (last - 10, last)).bucket_steps == 1


def test_what_ranks_say_of_waits_is_collected_without_doubles() -> None:
    state = state_of(1)
    part = next(iter(state.ranks.values())).value
    tails: dict[history.Key, s.Window] = {}
    drawn = [vw.Chart((Pick("wait_seconds", vw.ALL_RANKS), Pick("memory_bytes", vw.ALL_RANKS), Pick("loss")))]
    for step in (*range(1, 9), *range(5, 12), *range(40, 43)):
        state = msgspec.structs.replace(state, parts={0: (msgspec.structs.replace(part, step=step),)})
        tails = history.collected(tails, state, drawn)
        if step == 11:
            assert tails["wait_seconds", 0].first.tolist() == list(range(1, 12))
    assert tails["memory_bytes", 0].first.tolist() == [40, 41, 42]


def test_a_metric_that_the_run_brought_is_drawn_as_it_comes() -> None:
    state, tails, alone = state_of(1), dict[history.Key, s.Window](), ("user:reward", None)
    whole, step = state.run.step, state.last_step.value
    drawn = [vw.Chart((Pick("user:reward"),))]
    ask = history.Ask(state.run.run, ("user:reward",), 1, whole, 100, whole)
    answer = history.Answer(ask, {alone: window({whole: 50.0})})
    numbers = [*range(whole + 1, whole + 200), *range(4096, 4096 + 40 * 2048, 2048)]
    for seq, number in enumerate(numbers, state.seq + 1):
        message = msgspec.structs.replace(
            step, step=number, values={"user:reward": 1.0 * number}, seq=seq, boot=state.boot
        )
        state = reducer.apply(state, message, 0.0)
        tails = history.collected(tails, state, drawn)
        assert not history.is_torn(answer, state, tails)
    found = history.window_of([answer], state, alone, (1, numbers[-1]), tails)
    assert found.last.tolist() == [50.0, *map(float, numbers)]


def test_asks_are_cut_to_the_protocol_s_limits() -> None:
    metrics = history.needed(VIEW.charts)
    assert set(metrics) >= {"loss", "loss_not_finite", "tokens_total", "committed_at"}
    ask = history.ask_of("r", metrics, (0.5, 2000.7), 1500, 240)
    assert (ask.first, ask.last, ask.columns, ask.end) == (1, 1500, 240, 2001)
    assert history.parts(ask, 2) == [metrics]
    many = history.parts(dataclasses.replace(ask, columns=2000), 16)
    assert sum(many, ()) == metrics
    assert len(many) > 1


def test_a_value_that_was_not_finite_comes_back_as_a_mark() -> None:
    ask = history.ask_of("r", ("loss", "loss_not_finite"), (1, 10), 10, 20)
    ones = tuple([1.0] * 3)
    reply = m.History(rid="r", series=(
        m.Series("loss", None, 1, (1, 2, 4), ones, ones, ones, ones),
        m.Series("loss_not_finite", None, 1, (3,), (1.0,), (1.0,), (1.0,), (1.0,)),
    ))  # fmt: skip
    made = history.answer_of(ask, [reply]).windows["loss", None]
    assert made.first.tolist() == [1, 2, 3, 4]
    assert made.broken.tolist() == [0, 0, 1, 0]
    assert np.isnan(made.maximum[2])
