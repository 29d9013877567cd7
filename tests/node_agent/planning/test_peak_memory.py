"""Peak memory by micro-batch, from a calibration, from steps, and from both."""

import pytest
from tests.node_agent.support import records
from tests.protocol.support.profiles import profile_of

from trainctl.node_agent.planning.rank_models import MemoryPeaks
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import summary

PROFILE = summary(profile_of())
"""A pass holds 10 MB, and 0.5 MB for each sample."""


def report(micro: int, peak: float, rank: int = 0, replays: int = 0) -> m.Report:
    values = {"memory_peak_bytes": peak, "memory_cap_bytes": 15e6}
    return records.report(rank, own_samples=micro, micro_batch=micro, replays=replays, values=values)


def test_a_calibration_counts_until_a_step_tells_what_else_the_trainer_holds() -> None:
    peaks = MemoryPeaks()
    peaks.calibrated(0, PROFILE)
    assert peaks.of([0, 1])[0].peak(16) == pytest.approx(18e6)
    peaks.reported({0: report(4, 32e6)}, 1)
    assert peaks.of([0])[0].peak(16) == pytest.approx(38e6)


def test_a_chosen_micro_batch_has_been_run_and_fits() -> None:
    peaks = MemoryPeaks()
    assert peaks.most_micro(0) is None
    peaks.calibrated(0, PROFILE)
    assert peaks.most_micro(0) == 8, "no cap is known"
    peaks = MemoryPeaks()
    peaks.calibrated(0, PROFILE, cap_bytes=15_000_000)
    assert peaks.most_micro(0) == 5, "12.5 of at most 12.75 MB"
    peaks.reported({0: report(4, 14e6)}, 1)
    assert peaks.most_micro(0) == 1, "the trainer holds more than the calibration did"


def test_steps_of_several_micro_batches_need_no_calibration() -> None:
    peaks = MemoryPeaks()
    peaks.reported({0: report(4, 30e6), 1: report(4, 90e6, rank=1)}, 1)
    assert peaks.of([0, 1]) == {}
    peaks.reported({0: report(8, 34e6)}, 2)
    peaks.reported({0: report(12, 99e6, replays=1)}, 2)
    assert peaks.of([0, 1]).keys() == {0}
    assert peaks.of([0])[0].peak(16) == pytest.approx(42e6)


def test_memory_that_a_smaller_micro_batch_does_not_give_back_hides_no_sample() -> None:
    peaks = MemoryPeaks()
    peaks.calibrated(0, PROFILE)
    for version, (micro, peak) in enumerate([(8, 14e6), (5, 13.9e6)]):
        peaks.reported({0: report(micro, peak)}, version)
    assert peaks.of([0])[0].peak(16) == pytest.approx(18e6)
    peaks.reported({0: report(4, 2e6)}, 9)
    assert peaks.of([0])[0].sample_bytes > 0.5e6, "steps that show more count"


def ready(device: str, pid: int = 7, rank: int = 0) -> m.Ready:
    return m.Ready(
        run="r", rank=rank, pid=pid, backend="torch", device=device, parameters=1_000_000, samples=9, held_out=0,
        mean_weight=1.0, layout_digest="l", model_digest="m", data_digest="d", last_step=0, cursor=0,
        memory_cap_bytes=30_000_000, profile=PROFILE,
    )  # fmt: skip


def test_the_copy_that_a_checkpoint_is_written_from_counts_once_and_before_there_is_one() -> None:
    """12 MB beside the 18 MB of a calibrated pass of 16 samples, and the 32 MB of a step of 4 samples."""
    peaks = MemoryPeaks()
    peaks.loaded(ready("cpu"), 12_000_000)
    assert peaks.of([0])[0].peak(16) == pytest.approx(30e6)
    assert peaks.most_micro(0) == 7, "25.5 of 30 MB"
    peaks.reported({0: report(4, 32e6)}, 1)
    assert peaks.of([0])[0].peak(4) == pytest.approx(44e6)
    peaks.copied([0, 1])
    assert peaks.of([0])[0].peak(16) == pytest.approx(30e6), "no step has been made since"
    peaks.reported({0: report(4, 43e6)}, 1)
    peaks.copied([0])
    peaks.loaded(ready("cpu"), 12_000_000)
    assert peaks.of([0])[0].peak(4) == pytest.approx(43e6), "it is in the step's own peak"
    peaks.loaded(ready("cpu", pid=8), 12_000_000)
    assert peaks.of([0])[0].peak(4) == pytest.approx(55e6), "another process makes its own"
