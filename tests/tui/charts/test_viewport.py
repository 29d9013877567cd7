"""The view of the charts: zoom and its undoing, panning, the crosshair, smoothing, the axes and the scales."""

import dataclasses
import datetime
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from trainctl.protocol import messages as m
from trainctl.tui.charts import viewport as vw
from trainctl.tui.charts.axis import Axis, Scale, axis_of, ticks
from trainctl.tui.charts.traces import smooth
from trainctl.tui.charts.viewport import ChartView, Extent, Pick
from trainctl.tui.state import series as s

CHARTS = (vw.Chart((Pick("loss"),)), vw.Chart((Pick("busy_seconds", vw.ALL_RANKS),)))
VIEW = ChartView(CHARTS)
STEPS = st.integers(64, 2_000_000)


def act(view: ChartView, action: str, extent: Extent) -> ChartView:
    return vw.ACTIONS[action](view, extent)


def axis(kind: str, newest: int, pauses: dict[int, float] | None = None) -> Axis:
    """Steps of 2 s or 1,000 tokens, with pauses in seconds after some of them."""
    if kind == "step":
        return Axis()
    steps = np.unique(np.linspace(1, newest, 50).astype(np.int64)).astype(np.float64)
    values = 1000.0 * steps if kind == "tokens" else 1.7e9 + 2.0 * steps
    for step, pause in (pauses or {}).items():
        values = values + np.where(steps > step, pause, 0.0)
    return Axis(kind, steps, values)  # type: ignore[arg-type]


@given(STEPS, st.floats(0, 1), st.integers(1, 5), st.sampled_from(["step", "tokens", "time"]), st.booleans())
@settings(max_examples=80, deadline=None)
def test_zooming_in_and_out_again_returns(newest: int, part: float, times: int, kind: str, live: bool) -> None:
    extent = Extent(newest, 0, live, 100, axis(kind, newest, {newest // 3: 5000.0}))
    view = vw.pointed(VIEW, part, extent)
    before, widest = vw.shown(view, extent), view
    views = [view]
    for _ in range(times):
        view = act(view, "zoom_in", extent)
        views.append(view)
        first, last = vw.shown(view, extent)
        assert before[0] - 1e-3 <= first < last + 1 <= before[1] + 1 + 1e-3
    taken = sum(a != b for a, b in itertools.pairwise(views))
    for _ in range(taken):
        view = act(view, "zoom_out", extent)
    assert vw.shown(view, extent) == pytest.approx(before, abs=0.01 * max(1.0, newest * 1e-6))
    assert dataclasses.replace(view, span=None, last=None) == dataclasses.replace(widest, span=None, last=None)


@given(STEPS, st.lists(st.sampled_from(sorted(vw.ACTIONS)), max_size=30), st.booleans())
@settings(max_examples=80, deadline=None)
def test_no_keys_lead_outside_the_run_or_to_nothing(newest: int, actions: list[str], live: bool) -> None:
    view, extent = VIEW, Extent(newest, 3 * newest, live)
    first, last = extent.whole
    for action in actions:
        view = act(view, action, extent)
        low, high = vw.shown(view, extent)
        assert high - low + 1 >= min(vw.MIN_STEPS, last - first + 1) - 1e-6
        assert low >= first - 1e-6
        assert view.crosshair is None or view.crosshair >= 1
        assert 0 <= view.focus < len(view.charts)
    reset = act(act(view, "reset", extent), "reset", extent)
    assert vw.shown(reset, extent) == (first, last)


def test_without_a_crosshair_zooming_keeps_to_the_newest_step_and_jumps_by_pages() -> None:
    extent = Extent(10_000)
    view = act(act(VIEW, "zoom_in", extent), "zoom_in", extent)
    assert view.following
    pages = {vw.shown(view, dataclasses.replace(extent, newest=10_000 + step)) for step in range(0, 1000, 10)}
    assert len(pages) <= 3
    for first, last in pages:
        assert last - first + 1 == pytest.approx(view.span, abs=4)
    back = act(view, "pan_left", extent)
    assert not back.following
    assert vw.shown(back, extent) == vw.shown(back, dataclasses.replace(extent, newest=10_100))
    assert act(back, "newest", extent).following
    assert act(act(back, "pan_right", extent), "pan_right", extent).following
    assert vw.shown(act(back, "first", extent), extent)[0] == 1


def test_the_crosshair_goes_by_columns_or_by_steps_where_those_are_wider() -> None:
    extent = Extent(10_000, live=False, columns=100)
    view = act(VIEW, "cross_left", extent)
    assert view.crosshair == 10_000
    view = act(view, "cross_left", extent)
    assert view.crosshair == pytest.approx(9900)
    narrow = dataclasses.replace(view, span=20.0, last=9905.0)
    assert act(narrow, "cross_right", extent).crosshair == 9901
    assert act(act(narrow, "reset", extent), "cross_right", extent).crosshair == 9905


def windows(values: list[tuple[int, float]], capacity: int = 64) -> s.Window:
    made = s.empty(capacity)
    for step, value in values:
        made = s.add(made, step, value)
    return made


@given(st.lists(st.tuples(st.integers(1, 300), st.floats(-1e3, 1e3) | st.just(math.nan)), max_size=60, unique_by=lambda
                item: item[0]), st.floats(0.5, 200))  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_smoothing_is_the_formula_and_keeps_within_the_values(values: list[tuple[int, float]], half: float) -> None:
    window = windows(sorted(values), 512)
    made = smooth(window, half)
    assert (np.isfinite(made) == (window.count > 0)).all()
    known = [(step, value) for step, value in sorted(values) if math.isfinite(value)]
    for step, value in zip(window.first.tolist(), made.tolist(), strict=True):
        if math.isfinite(value):
            weights = [(0.5 ** ((step - at) / half), one) for at, one in known if at <= step]
            wanted = sum(w * one for w, one in weights) / sum(w for w, _ in weights)
            assert value == pytest.approx(wanted, rel=1e-6, abs=1e-6)


def test_an_old_level_is_forgotten_over_a_gap() -> None:
    window = windows([*((step, 10.0) for step in range(1, 41)), (2000, 1.0), (2001, 1.0)], 4096)
    assert smooth(window, 20)[-1] == pytest.approx(1.0)
    assert smooth(windows([(1, 4.0)]), 1000)[0] == 4.0


@given(st.lists(st.floats(1e-9, 1e9), min_size=2, max_size=20), st.integers(2, 40))
def test_log_and_linear_agree_on_order(values: list[float], rows: int) -> None:
    array = np.array(values)
    for scale in (Scale(), Scale(log=True)):
        low, high = scale.range_of(min(values), max(values), 0.02)
        heights = scale.place(array)
        assert (heights[np.argsort(array)][1:] >= heights[np.argsort(array)][:-1]).all()
        assert low <= heights.min() <= heights.max() <= high
        labels = scale.ticks(low, high, rows)
        assert labels
        assert all(low - 1e-9 <= height <= high + 1e-9 for height in labels)


def series(metric: str, size: int, rows: list[tuple[int, float, float]]) -> m.Series:
    steps, low, high = zip(*rows, strict=True)
    return m.Series(metric, None, size, steps, low, high, low, high)


def test_an_axis_of_tokens_is_exact_at_the_ends_of_buckets_and_reaches_beyond() -> None:
    coarse = series("tokens_total", 100, [(0, 10.0, 990.0), (100, 1000.0, 1990.0), (200, 2000.0, 2500.0)])
    fine = series("tokens_total", 10, [(100, 1000.0, 1090.0), (110, 1200.0, 1290.0)])
    made = axis_of("tokens", coarse, fine)
    assert made.to_x(np.array([1.0, 99.0, 100.0, 109.0, 110.0, 200.0])).tolist() == [10, 990, 1000, 1090, 1200, 2000]
    assert made.to_step(made.to_x(55.0)) == pytest.approx(55.0)
    assert float(made.to_x(400.0)) == pytest.approx(2000 + 200 * 1990 / 199)
    assert float(made.to_step(made.to_x(400.0))) == pytest.approx(400.0)
    assert not axis_of("tokens", None, None).known


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30))
def test_a_clock_that_was_set_back_does_not_fold_the_axis(times: list[float]) -> None:
    made = axis_of("time", series("committed_at", 1, [(i + 1, at, at) for i, at in enumerate(times)]), None)
    assert (np.diff(made.steps) > 0).all()
    assert (np.diff(made.values) > 0).all()


@given(st.floats(0, 1e12), st.floats(1, 1e12), st.integers(4, 300), st.sampled_from(["step", "tokens", "time"]))
def test_ticks_are_in_view_and_few(low: float, size: float, columns: int, kind: str) -> None:
    assume(low + size > low)
    found = ticks(axis(kind, 1000), low, low + size, columns, datetime.UTC)
    assert len(found) <= columns // 3 + 2
    assert all(low - size * 1e-6 <= x <= low + size * (1 + 1e-6) for x, _ in found)
