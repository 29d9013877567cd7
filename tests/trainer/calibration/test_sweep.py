"""The sweep with a device of known speed: which sizes it measures, when it ends, and that noise doesn't mislead it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.calibration.peak import peak
from trainctl.protocol.calibration.profile import Pass
from trainctl.trainer.calibration.sweep import GRID_SECONDS, SWEEP_SECONDS, StepTime, Sweep
from trainctl.trainer.common.errors import DeviceMemoryError


class Device:
    """A device whose passes take the time that its curve says, by a clock of its own."""

    def __init__(self, rate, room=10**6, disturbed=lambda now: 1.0):
        self.rate, self.room, self.disturbed = rate, room, disturbed
        self.now, self.tried = 0.0, []

    def time_pass(self, micro):
        self.tried.append(micro)
        if micro > self.room:
            raise DeviceMemoryError("out of memory")
        seconds = micro / self.rate(micro) * self.disturbed(self.now)
        self.now += 3 * max(seconds, 0.25)
        return Pass(micro, seconds, 1000 * micro)

    def time_again(self, known):
        seconds = known.micro / self.rate(known.micro) * self.disturbed(self.now)
        self.now += max(seconds, 0.25)
        return Pass(known.micro, seconds, 1000 * known.micro)

    def sweep(self, most=64, seconds=SWEEP_SECONDS):
        sweep = Sweep(self, lambda _: None, lambda: self.now)
        sweep.measure_passes(most, seconds)
        return sweep


def rising(top, fall=0.5):
    return lambda micro: 1000 * (micro / (micro + 2)) * (1.0 if micro <= top else (top / micro) ** fall)


@pytest.mark.parametrize("top", [1, 2, 4, 6, 8, 16, 24, 48, 64])
def test_the_chosen_size_is_within_five_percent_of_the_best_of_all(top):
    device = Device(rising(top))
    chosen = peak(device.sweep().passes)
    assert device.rate(chosen.micro) >= 0.95 * max(map(device.rate, range(1, 65)))


def test_it_ends_past_two_falls():
    device = Device(rising(4))
    device.sweep()
    assert max(device.tried) == 16


@given(st.integers(1, 64), st.integers(0, 2**32), st.floats(0, 20), st.floats(0.5, 1.5))
def test_a_short_disturbance_changes_the_choice_little(top, seed, start, length):
    draw = random.Random(seed)

    def disturbed(now):
        return draw.uniform(1.0, 1.02) * (2.0 if start <= now < start + length else 1.0)

    device = Device(rising(top), disturbed=disturbed)
    chosen = peak(device.sweep().passes)
    assert device.rate(chosen.micro) >= 0.9 * max(map(device.rate, range(1, 65)))


@given(st.integers(0, 70))
def test_what_ran_out_of_memory_is_not_tried_again(room):
    device = Device(rising(64), room=room)
    sweep = device.sweep()
    assert all(known.micro <= room for known in sweep.passes) and bool(sweep.passes) == bool(room)
    failed = [micro for micro in device.tried if micro > room]
    assert failed == sorted(set(failed), reverse=True), "each smaller than the last"
    assert sweep.out_of_memory_micro == (failed[-1] if failed else None)
    assert failed or room >= 64


def test_a_slow_device_still_measures_one_sample():
    device = Device(lambda _: 0.01)
    assert [one.micro for one in device.sweep().passes] == [1]


@pytest.mark.parametrize("seconds", [1.5, 4.0, 18.0])
def test_it_takes_about_as_long_as_it_may(seconds):
    device = Device(rising(64))
    device.sweep(seconds=seconds)
    assert 0.5 * seconds < device.now < seconds + 0.75


class Steps:
    """Runs steps whose passes take 0.1 s a sample, and an update of 0.2 s."""

    def __init__(self, *passes, sample_seconds=0.1, update_seconds=0.2, room=10**6):
        self.passes = {known.micro: known for known in passes}
        self.sample_seconds, self.update_seconds, self.room, self.samples = sample_seconds, update_seconds, room, {}

    def step(self, micro, samples):
        self.samples[micro] = samples
        if micro > self.room:
            raise DeviceMemoryError("out of memory")
        return StepTime(self.sample_seconds * samples + self.update_seconds, self.update_seconds)

    def sweep(self, effective, seconds=GRID_SECONDS):
        sweep = Sweep(self, lambda _: None)
        sweep._passes = self.passes
        sweep.measure_steps(effective, seconds)
        return sweep


KNOWN = (Pass(1, 0.09, 10), Pass(4, 0.9, 40), Pass(5, 0.8, 50), Pass(24, 9.0, 240))


def test_a_pass_that_was_disturbed_has_the_time_that_it_takes_in_a_step():
    steps = Steps(*KNOWN)
    sweep = steps.sweep(12)
    assert sorted(steps.samples) == [1, 4, 5]
    assert [known.seconds for known in sweep.passes] == pytest.approx([0.09, 0.4, 0.8, 9.0])
    assert [known.peak_bytes for known in sweep.passes] == [10, 40, 50, 240]
    assert sweep.update_seconds == pytest.approx(0.2)
    assert [(point.micro, point.accumulation) for point in sweep.grid] == [(1, 12), (4, 3), (5, 3)]


def test_a_step_that_runs_out_of_memory_costs_its_size_and_larger_ones():
    sweep = Steps(*KNOWN, room=4).sweep(12)
    assert sweep.out_of_memory_micro == 5
    assert [known.micro for known in sweep.passes] == [1, 4]
    assert [point.micro for point in sweep.grid] == [1, 4]


def test_a_step_that_would_take_too_long_is_measured_with_fewer_samples():
    steps = Steps(Pass(2, 2.0, None), Pass(1, 1.5, None), sample_seconds=1.0, update_seconds=0.5)
    sweep = steps.sweep(1024, seconds=8.0)
    assert max(steps.samples.values()) <= 8 and sweep.update_seconds == 0.5
