"""Tests of what a step takes a rank: by its share and micro-batch, and by curves of passes."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel, Timing, fit, middle, models
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Phases

CURVE = PassCurve.line(0.1, 0.05)


def step(share: int, micro: int, slowdown: float = 1.0) -> Timing:
    return Timing.of(share, Phases(forward=slowdown * StepModel(CURVE).busy_seconds(share, micro), sync=0.2), micro)


def test_a_share_is_run_in_passes_and_one_of_the_rest() -> None:
    model = StepModel(CURVE, floor_seconds=0.3, slowdown=2.0)
    assert model.busy_seconds(10, 4) == pytest.approx(2 * (2 * 0.3 + 0.2))
    assert model.seconds(10, 4) == pytest.approx(1.9)
    assert model.seconds(3, 8) == pytest.approx(0.3 + 2 * 0.25)
    assert model.samples_per_second(4) == pytest.approx(4 / 0.6)
    assert model.best_micro(10, 8) == 5, "two passes, and the smaller one of those"
    assert model.best_micro(10, 4) == 4
    assert model.best_micro(1, 8) == 1


def test_a_linear_model_expects_one_rate_of_all_micro_batches() -> None:
    model = StepModel.linear(20.0, 0.1)
    assert model.is_linear
    assert [model.seconds(10, micro) for micro in (1, 3, 16)] == pytest.approx([0.6] * 3)
    assert model.samples_per_second(7) == pytest.approx(20.0)
    for rate in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(InvalidInputError, match="rate: a rank needs a measured rate above 0"):
            StepModel.linear(rate)


def test_a_rank_s_rate_is_of_its_last_steps_and_its_floor_has_no_wait_for_others() -> None:
    """The fast rank spends 0.5 s in sync, all but the transfer's 0.1 s waiting for the slow one."""
    fast = Phases(data=0.1, forward=0.1, backward=0.2, sync=0.5, optimizer=0.02, wait=0.01)
    slow = Phases(data=0.1, forward=0.3, backward=0.4, sync=0.1, optimizer=0.2, wait=0.03)
    odd = Phases(data=9.0, sync=9.0, optimizer=9.0, wait=9.0)
    found = models({0: [Timing.of(8, fast), Timing.of(8, fast), Timing.of(8, odd)], 1: [Timing.of(4, slow)] * 3, 2: []})
    assert found.keys() == {0, 1}
    assert all(model.is_linear for model in found.values())
    assert found[0].samples_per_second(8) == pytest.approx(8 / 0.4)
    assert found[1].samples_per_second(4) == pytest.approx(4 / 0.8)
    assert [model.floor_seconds for model in found.values()] == pytest.approx([0.13, 0.31])
    assert models({0: [Timing.of(0, Phases(sync=1.0))]}) == {}, "nothing computed, no model"
    assert middle([1.0, 1.02, 0.98]) == pytest.approx(1.0)
    assert middle([1.0, 1.0, 1.0, 9.0, 9.0]) == 1.0, "odd values are left out"
    assert middle([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0]) == 2.0, "former ones too"


def test_a_curve_is_scaled_by_what_the_last_steps_took() -> None:
    found = models({0: [step(10, 4, slowdown=1.3)] * 8, 1: [step(10, 4)] * 8}, {0: CURVE})
    assert found[0].slowdown == pytest.approx(1.3)
    assert found[0].curve is CURVE
    assert found[0].seconds(20, 8) == pytest.approx(1.3 * (2 * 0.5 + 0.3) + 0.2)
    assert found[1].is_linear


def test_steps_of_different_passes_tell_the_cost_of_a_pass() -> None:
    chance = random.Random(3)
    rows = [step(*work, chance.lognormvariate(0, 0.02)) for work in [(24, 4), (24, 12)] for _ in range(4)]
    curve = fit(rows)
    assert curve.seconds(8) == pytest.approx(CURVE.seconds(8), rel=0.04)
    assert curve.seconds(24) == pytest.approx(CURVE.seconds(24), rel=0.08)
    assert [size for size, _ in curve.points] == [1, 2], "a line, since two micro-batches can't show any bend"


def test_three_micro_batches_make_a_table() -> None:
    """The rate falls above 8, so no line goes through all."""
    table = PassCurve(((1, 0.1), (4, 0.25), (8, 0.45), (16, 1.1)))
    rows = [
        Timing.of(share, Phases(forward=StepModel(table).busy_seconds(share, micro)), micro)
        for share, micro in [(16, 1), (16, 4), (16, 8), (16, 16)]
        for _ in range(4)
    ]
    curve = fit(rows)
    assert [size for size, _ in curve.points] == [1, 4, 8, 16]
    assert [curve.seconds(size) for size in (4, 8, 16)] == pytest.approx([0.25, 0.45, 1.1], rel=1e-6)


def test_nothing_is_fitted_to_steps_that_tell_nothing_of_a_pass() -> None:
    chance = random.Random(5)
    alike = [step(share, 4, chance.lognormvariate(0, 0.02)) for share in (24, 28) for _ in range(4)]
    unknown = [row._replace(micro=0) for row in alike]
    proportional = [
        Timing.of(share, Phases(forward=share * 0.05 * chance.lognormvariate(0, 0.02)), share)
        for share in (12, 24) for _ in range(4)
    ]  # fmt: skip
    assert [fit(rows) for rows in (alike, unknown, proportional, [])] == [None] * 4


SIZES = (1, 2, 4, 8, 16, 32, 64)
tables = st.dictionaries(st.integers(1, 300), st.floats(1e-4, 100), min_size=1, max_size=9)


@given(tables, st.integers(1, 400))
def test_more_samples_never_take_less(table: dict[int, float], size: int) -> None:
    curve = PassCurve(tuple(table.items()))
    assert curve.seconds(size) <= curve.seconds(size + 1) * (1 + 1e-9)
    assert curve.most(curve.seconds(size)) >= size
    assert curve.seconds(curve.most(curve.seconds(size))) <= curve.seconds(size) * (1 + 1e-6)


@given(st.lists(st.floats(0.01, 1), min_size=2, max_size=8))
def test_rising_points_are_kept(steps: list[float]) -> None:
    points = [(2**index, sum(steps[: index + 1])) for index in range(len(steps))]
    curve = PassCurve(tuple(points))
    assert [curve.seconds(size) for size, _ in points] == pytest.approx([seconds for _, seconds in points])


def test_falling_neighbours_get_their_mean_and_seconds_lie_on_lines_between_points_and_beyond_them() -> None:
    curve = PassCurve(((4, 2.0), (1, 1.0), (8, 1.0), (16, 3.0)))
    assert curve.points == ((1, 1.0), (4, 1.5), (8, 1.5), (16, 3.0))
    curve = PassCurve(((2, 1.0), (4, 1.5), (8, 3.5)))
    assert [curve.seconds(size) for size in (0, 1, 3, 6, 10)] == pytest.approx([0.0, 0.75, 1.25, 2.5, 4.5])
    alone = PassCurve(((4, 2.0),))
    assert [alone.seconds(size) for size in (1, 4, 12)] == pytest.approx([0.5, 2.0, 6.0])
    assert [curve.most(seconds) for seconds in (0.5, 0.75, 1.49, 4.5)] == [0, 1, 3, 10]
    for points in ((), ((1, 0.0),), ((0, 1.0),)):
        with pytest.raises(InvalidInputError, match="at least one micro-batch with positive seconds"):
            PassCurve(points)


def test_the_peaks_of_two_chips_are_found() -> None:
    """Samples per second of one that needs large passes, and of one that is fastest at 4."""
    rates = {1: 200, 8: 450, 16: 620, 32: 776, 64: 750}, {1: 180, 4: 278, 8: 265, 16: 240, 32: 210}
    large, small = (PassCurve(tuple((size, size / rate) for size, rate in chip.items())) for chip in rates)
    assert (large.peak(), small.peak()) == (32, 4)
    assert (large.peak(24), small.peak(3)) == (24, 3)
    assert small.samples_per_second(4) == pytest.approx(278)


def test_noise_is_averaged_out_where_the_curve_is_straight() -> None:
    """A pass costs 0.1 s and a sample 0.02 s; every point is measured with 2 % noise."""
    ragged, smooth = [], []
    for seed in range(200):
        chance = random.Random(seed)
        points = [(size, (0.1 + 0.02 * size) * chance.lognormvariate(0, 0.02)) for size in SIZES]
        for curve, errors in ((PassCurve(tuple(points)), ragged), (PassCurve.smoothed(points, 0.02), smooth)):
            errors += [abs(curve.seconds(size) / (0.1 + 0.02 * size) - 1) for size in SIZES]
    assert statistics.mean(smooth) < 0.7 * statistics.mean(ragged)


def test_a_bend_larger_than_the_noise_stays() -> None:
    """The rate falls by a tenth with each doubling beyond 8."""
    points = [(size, size / min(10 * size, 80 * 0.9 ** max(SIZES.index(size) - 3, 0))) for size in SIZES]
    curve = PassCurve.smoothed(points, 0.02)
    assert curve.peak() == 8
    assert curve.seconds(64) == pytest.approx(points[-1][1], rel=0.03)
    assert PassCurve.smoothed(points, 0.0) == PassCurve(tuple(points))
