"""Tests of what the conductor knows of its ranks' speed: by calibration, by a measurement, and by the steps they
report."""

import msgspec
import pytest
from tests.node_agent.support import records
from tests.protocol.support.profiles import profile_of

from trainctl.node_agent.planning.rank_models import NEWEST, Rates
from trainctl.protocol import messages as m
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.calibration.profile import ProfileSummary, summary

PROFILE = msgspec.structs.replace(summary(profile_of()), optimizer_seconds=0.004)
"""A pass takes 10 ms and 2 ms a sample."""


def report(share: int, micro: int, busy: float, rank: int = 0, replays: int = 0) -> m.Report:
    phases = m.Phases(forward=busy, sync=0.003, optimizer=0.001)
    return records.report(rank, own_samples=share, micro_batch=micro, replays=replays, phases=phases)


def busy(share: int, micro: int) -> float:
    """As calibrated."""
    return StepModel(PassCurve.line(0.010, 0.002)).busy_seconds(share, micro)


def calibrated(profile: ProfileSummary = PROFILE) -> Rates:
    rates = Rates()
    rates.calibrated(0, profile)
    return rates


def test_a_calibrated_rank_is_known_before_its_first_step_but_has_not_been_timed() -> None:
    rates = calibrated()
    model = rates.of([0, 1])[0]
    assert rates.of([0, 1]).keys() == {0}
    assert model.seconds(8, 4) == pytest.approx(0.004 + busy(8, 4))
    assert rates.timed([0, 1]) == {}


def take(rates: Rates, reports: list[m.Report]) -> None:
    """A step for each report."""
    for one in reports:
        rates.reported({one.rank: one}, plan_version=100 * one.own_samples + one.micro_batch)


def test_its_steps_say_how_much_slower_it_is_at_every_micro_batch() -> None:
    rates = calibrated()
    take(rates, [report(12, 4, 1.5 * busy(12, 4))] * NEWEST)
    model = rates.of([0])[0]
    assert model.slowdown == pytest.approx(1.5)
    assert model.busy_seconds(12, 8) == pytest.approx(1.5 * busy(12, 8))
    assert model.floor_seconds == pytest.approx(0.004)
    assert rates.timed([0]) == rates.of([0])


def test_a_measurement_alone_counts_at_its_micro_batch() -> None:
    rates = calibrated()
    for rank in (0, 1):
        rates.measured(rank, 100.0, 4)
    calibrated_one, plain = rates.of([0, 1]).values()
    assert calibrated_one.busy_seconds(4, 4) == pytest.approx(0.04)
    assert calibrated_one.busy_seconds(8, 8) < plain.busy_seconds(8, 8) == pytest.approx(0.08)


def test_without_a_calibration_steps_of_several_micro_batches_make_the_curve() -> None:
    rates = Rates()
    take(rates, [report(16, 2, busy(16, 2))] * NEWEST)
    take(rates, [report(16, 8, busy(16, 8), replays=1)] * NEWEST)  # which repeated passes
    assert rates.of([0])[0].is_linear
    take(rates, [report(16, 8, busy(16, 8) * (1 + 0.001 * (step % 2))) for step in range(NEWEST)])
    model = rates.of([0])[0]
    assert not model.is_linear
    assert model.busy_seconds(16, 4) == pytest.approx(busy(16, 4), rel=0.01)


def test_steps_of_another_speed_make_no_curve_with_those_before() -> None:
    rates = Rates()
    for share, slowdown in ((64, 1), (32, 1), (32, 2), (20, 2)):
        take(rates, [report(share, 64, slowdown * busy(share, 64))] * NEWEST)
    assert rates.of([0])[0].busy_seconds(64, 64) == pytest.approx(2 * busy(64, 64), rel=0.01)
