"""Windows of a series: bounded, with their extremes and gaps, and where the ranks changed."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.recorded import NOW, comings_and_goings, run_view

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import AnyEvent, GenerationFormed, GenerationLeft, SharesChanged
from trainctl.tui.state import series as s
from trainctl.tui.state.run_events import Change, changes_of_ranks

values = st.lists(
    st.tuples(st.integers(0, 5000), st.floats(-1e6, 1e6) | st.just(math.nan) | st.just(math.inf)), max_size=200
)


def filled(pairs: list[tuple[int, float]], capacity: int = 16) -> s.Window:
    window = s.empty(capacity)
    for step, value in pairs:
        window = s.add(window, step, value)
    return window


@given(values)
@settings(max_examples=60, deadline=None)
def test_a_window_stays_bounded_and_keeps_its_extremes(pairs: list[tuple[int, float]]) -> None:
    window = filled(pairs)
    finite = [value for _, value in pairs if math.isfinite(value)]
    assert len(window) <= 16
    assert (np.diff(window.first) >= window.bucket_steps).all()
    assert (window.first % window.bucket_steps == 0).all()
    assert window.count.sum() == len(finite)
    assert window.broken.sum() == len(pairs) - len(finite)
    if finite:
        assert np.nanmax(window.maximum) == max(finite)
        assert np.nanmin(window.minimum) == min(finite)
        assert math.isclose(window.total.sum(), math.fsum(finite), rel_tol=1e-9, abs_tol=1e-3)


def test_resolution_halves_only_when_full() -> None:
    window = s.empty(16)
    sizes = []
    for step in range(1, 65):
        window = s.add(window, step, float(step))
        sizes.append(window.bucket_steps)
    assert sizes[14] == 1
    assert sizes[16] == 2
    assert sorted(sizes) == sizes
    assert window.last[-1] == 64


def test_an_agents_series_opens_a_window() -> None:
    nan = math.nan
    series = m.Series("loss", None, 10, (0, 10, 30), (1.0, 2.0, nan), (3.0, 4.0, nan), (2.0, 3.0, nan), (1.5, 2.5, nan))
    window = s.from_series(series, 34)
    assert window.first.tolist() == [0, 10, 30]
    assert window.count.tolist() == [10, 10, 0]
    assert window.broken.tolist() == [0, 0, 1]
    window = s.add(window, 35, 9.0)
    assert window.maximum[-1] == 9.0
    assert window.first[-1] == 30


def test_trend_needs_enough_steps_and_has_the_right_sign_and_size() -> None:
    window = filled([(step, 2.0 - 0.001 * step) for step in range(1, 121)], 512)
    change = s.trend(window, 100)
    assert math.isclose(change, -0.1 / (2.0 - 0.001 * 17.5), rel_tol=1e-6)
    assert s.trend(window, 1000) is None
    assert s.trend(s.tail(window, 21), 100) is None  # nothing from before those steps to compare with
    assert s.trend(s.empty(), 100) is None


@pytest.mark.parametrize("steps", [1100, 5000])
def test_a_trend_never_tells_of_more_than_there_was(steps: int) -> None:
    """The trend of a loss that falls fast and levels out: a slope over the fall would say more than the whole of it."""
    values = [(step, 1.4 + 4.2 * math.exp(-step / 150)) for step in range(1, steps + 1)]
    change = s.trend(filled(values, 512), 1000)
    size = 1000 // 16
    then, now = (sum(value for _, value in values[end - size : end]) / size for end in (steps - 1000, steps))
    assert math.isclose(change, now / then - 1, abs_tol=0.03)
    assert change > -0.76


def test_typical_ignores_one_odd_step() -> None:
    window = filled([(step, 50.0 if step == 7 else 2.0) for step in range(1, 9)], 64)
    assert s.typical(window) == 2.0
    assert s.typical(s.empty()) is None


def test_the_mean_of_the_last_steps_is_by_steps_whatever_the_buckets() -> None:
    pairs = [(step, float(step)) for step in range(1, 65)]
    assert s.recent_mean(filled(pairs, 512), 16) == sum(range(49, 65)) / 16
    coarse = filled(pairs[:-1], 16)  # buckets of 4 steps
    assert coarse.bucket_steps == 4
    assert s.recent_mean(coarse, 16) == sum(range(48, 64)) / 16
    assert s.recent_mean(coarse, 2) == sum(range(60, 64)) / 4
    assert s.recent_mean(filled([(1, math.nan), (2, 3.0)], 16), 16) == 3.0
    assert s.recent_mean(filled([(1, math.nan)], 16), 16) is None
    assert s.recent_mean(s.empty(), 16) is None


def test_windows_that_grow_from_one_another_keep_their_own_values() -> None:
    """They share the room that they grow in, whichever is added to first."""
    common = s.empty()
    for step in range(1, 6):
        common = s.add(common, step, float(step))
    one, other = s.add(common, 6, 1.0), s.add(common, 6, 2.0)
    again = s.add(s.add(one, 7, 3.0), 7, 5.0)
    late = s.add(s.tail(one, 4), 7, 9.0)
    assert common.last.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert one.last.tolist() == [*common.last.tolist(), 1.0]
    assert other.last.tolist() == [*common.last.tolist(), 2.0]
    assert again.maximum.tolist() == [*one.last.tolist(), 5.0] and again.count[-1] == 2
    assert late.last.tolist() == [4.0, 5.0, 1.0, 9.0] and late.first.tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("value", [7.0, math.nan])
def test_windows_that_fold_and_merge_stay_in_stores_and_keep_their_own_values(value: float) -> None:
    """Values that are on the heap when all series of a run fold at one step would stay there."""
    window = s.empty(16)
    for step in range(1, 100):
        window = s.add(window, step, float(step))
        assert window.store is not None and window.store.window(window).last.tolist() == window.last.tolist()
    assert window.bucket_steps == 8
    one, other = s.add(window, 100, value), s.add(window, 100, 9.0)
    redone = s.add(window, 50, value)
    assert [window.count[-1], one.count[-1], other.count[-1]] == [4, 4 + math.isfinite(value), 5]
    assert [window.last[-1], other.last[-1], one.broken[-1]] == [99.0, 9.0, not math.isfinite(value)]
    assert redone.count.sum() + redone.broken.sum() == 100 and window.count.sum() == 99


@given(st.lists(values, min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_several_series_as_one_have_the_extremes_and_the_mean_of_all(several: list[list[tuple[int, float]]]) -> None:
    one = s.combined([filled(pairs) for pairs in several])
    finite = [value for pairs in several for _, value in pairs if math.isfinite(value)]
    assert sorted(set(one.first.tolist())) == one.first.tolist()
    assert all(first % one.bucket_steps == 0 for first in one.first.tolist())
    assert one.count.sum() == len(finite)
    assert int(one.broken.sum()) == sum(len(pairs) for pairs in several) - len(finite)
    if finite:
        assert np.nanmin(one.minimum) == min(finite) and np.nanmax(one.maximum) == max(finite)
        assert one.total.sum() == pytest.approx(math.fsum(finite), rel=1e-9, abs=1e-3)


def test_several_series_are_one_where_each_has_a_bucket() -> None:
    one = s.combined([filled([(1, 1.0), (2, 2.0), (3, math.nan)]), filled([(2, 4.0), (3, 5.0)])])
    assert one.first.tolist() == [1, 2, 3]
    assert one.mean.tolist() == [1.0, 3.0, 5.0]
    assert one.last.tolist() == [1.0, 3.0, 5.0]
    assert (one.minimum.tolist(), one.maximum.tolist(), one.broken.tolist()) == ([1, 2, 5], [1, 4, 5], [0, 0, 1])
    assert len(s.combined([])) == 0


def test_the_newest_bucket_of_an_agents_series_counts_the_steps_made_so_far() -> None:
    """Steps 10 to 29 and 30 to 34: the mean of all is by steps, (10 * 1 + 10 * 2 + 5 * 6) / 25."""
    columns = (1.0, 2.0, 6.0)
    window = s.from_series(m.Series("loss", None, 10, (10, 20, 30), columns, columns, columns, columns), 34)
    assert window.count.tolist() == [10, 10, 5]
    assert window.total.sum() / window.count.sum() == 2.4


def told(*changes: tuple[AnyEvent, int]) -> list[m.Event]:
    """Events as a conductor sends them: (data, step)."""
    return [
        m.Event(id=number, at=NOW, severity="info", by="auto", data=data, step=step, run="r")
        for number, (data, step) in enumerate(changes)
    ]


def formed(number: int, ranks: int, **rest: Any) -> GenerationFormed:
    return GenerationFormed(m.Generation(1, number), ranks, **rest)


FIRST = (formed(1, 3), 0)
LOST = SharesChanged({"a": 4, "b": 4, "c": 4}, {"a": 6, "b": 6, "c": 0}, "was ended by signal 9", lost="c")
SECOND_LOST = SharesChanged({"a": 6, "b": 6}, {"a": 12, "b": 0}, "hangs", lost="b")
BACK = SharesChanged({"a": 6, "b": 6, "c": 0}, {"a": 4, "b": 4, "c": 4}, returned="c")


def test_a_loss_and_a_return_begin_at_the_first_step_without_and_with_the_rank() -> None:
    events = told(
        FIRST, (LOST, 6), (formed(2, 2), 6),
        (BACK, 31), (formed(3, 3, behind=("c",), source="a"), 30),
    )  # fmt: skip
    assert changes_of_ranks(events) == [Change(7, "g1.2"), Change(31, "g1.3")]
    recorded = changes_of_ranks(comings_and_goings(run_view(3), 1))
    assert recorded == [Change(70, "g1.3"), Change(78, "g1.4"), Change(116, "g1.5")]


def test_a_node_drained_by_a_command_shows_by_the_number_of_ranks() -> None:
    assert changes_of_ranks(told(FIRST, (formed(2, 1), 9))) == [Change(10, "g1.2")]


def test_one_lost_while_another_is_back_is_a_change_too() -> None:
    events = told(FIRST, (LOST, 6), (formed(2, 2), 6), (SECOND_LOST, 9),
                  (BACK, 9), (formed(4, 2), 9))  # fmt: skip
    assert changes_of_ranks(events)[-1] == Change(10, "g1.4")


def test_of_events_that_begin_later_only_what_they_tell_counts() -> None:
    later = (formed(7, 2), 40)
    assert changes_of_ranks(told(later)) == []
    assert changes_of_ranks(told((LOST, 40), later)) == [Change(41, "g1.7")]


@pytest.mark.parametrize(
    "events",
    [
        (FIRST, (formed(2, 3), 20)),
        (FIRST, (GenerationLeft(m.Generation(1, 2), "b did not join in time"), 20), (formed(3, 3, behind=("b",)), 20)),
        ((SharesChanged({"a": 4, "c": 4}, {"a": 8, "c": 0}, "exited with 1", lost="c"), 0), (formed(1, 2), 0)),
    ],
    ids=["resumed", "formed at the second try", "before the first step"],
)
def test_the_same_ranks_again_are_no_change(events: tuple[tuple[AnyEvent, int], ...]) -> None:
    assert changes_of_ranks(told(*events)) == []


def test_of_generations_at_one_step_the_newest_counts() -> None:
    events = told(FIRST, (LOST, 6), (formed(2, 2), 6), (SECOND_LOST, 6), (formed(3, 1), 6))
    assert changes_of_ranks(events) == [Change(7, "g1.3")]
