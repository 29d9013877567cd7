"""What a step takes a rank, by its share and micro-batch, from reports with and without a curve."""

import random

import pytest

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
