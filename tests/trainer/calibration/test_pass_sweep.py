"""The sweep with a device of known speed: which sizes it measures, when it ends, and that noise doesn't mislead it."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.calibration.peak import peak
from trainctl.protocol.calibration.profile import Pass
from trainctl.trainer.calibration.findings import Findings
from trainctl.trainer.calibration.pass_sweep import SWEEP_SECONDS, Sweep
from trainctl.trainer.calibration.step_grid import grid
from trainctl.trainer.calibration.step_runner import StepTime
from trainctl.trainer.common.errors import DeviceMemoryError


class Device:
    """A device whose passes take the time that its curve says, by a clock of its own."""

    def __init__(self, rate, room=10**6, disturbed=lambda now: 1.0):
        self.rate, self.room, self.disturbed = rate, room, disturbed
        self.now, self.tried = 0.0, []

    def time_pass(self, micro):
        if micro > self.room:
            raise DeviceMemoryError("out of memory")
        seconds = micro / self.rate(micro) * self.disturbed(self.now)
        self.now += 3 * max(seconds, 0.25)
        return Pass(micro, seconds, 1000 * micro)

    def time_again(self, known):
        seconds = known.micro / self.rate(known.micro) * self.disturbed(self.now)
        self.now += max(seconds, 0.25)
        return Pass(known.micro, seconds, 1000 * known.micro)

    def sweep(self, known=None, most=64, seconds=SWEEP_SECONDS):
        found = Sweep(self, most, self.tried.append, lambda *_: None, lambda: self.now, seconds)
        return found.run(known or Findings())


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


@given(st.integers(1, 70))
def test_what_ran_out_of_memory_is_not_tried_again(room):
    device, known = Device(rising(64), room=room), Findings()
    for _ in range(8):
        try:
            known = device.sweep(known)
            break
        except DeviceMemoryError:
            failed = device.tried[-1]
            assert known.out_of_memory_micro is None or failed < known.out_of_memory_micro
            known = known.without_memory_for(failed)
    else:
        pytest.fail("the sweep doesn't end")
    assert all(one.micro <= room for one in known.passes)
    if room < 64:
        assert known.out_of_memory_micro is None or known.out_of_memory_micro > room


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

    def step(self, micro, samples):
        return StepTime(0.1 * samples + 0.2, 0.2)


def test_a_pass_that_was_disturbed_has_the_time_that_it_takes_in_a_step():
    known = (Pass(1, 0.09, 10), Pass(4, 0.9, 40), Pass(5, 0.8, 50), Pass(24, 9.0, 240))
    tried = []
    found = grid(Steps(), known, 12, tried.append)
    assert sorted(tried) == [1, 4, 5]
    assert {one.micro: one.seconds for one in found.passes} == pytest.approx({1: 0.09, 4: 0.4, 5: 0.8, 24: 9.0})
    assert [one.peak_bytes for one in found.passes] == [10, 40, 50, 240]
    assert found.update_seconds == pytest.approx(0.2)
    assert [(point.micro, point.accumulation) for point in found.points] == [(1, 12), (4, 3), (5, 3)]


def test_a_step_that_would_take_too_long_is_measured_with_fewer_samples():
    class Slow:
        def __init__(self):
            self.samples = []

        def step(self, micro, samples):
            self.samples.append(samples)
            return StepTime(samples * 1.0, 0.5)

    slow = Slow()
    found = grid(slow, [Pass(2, 2.0, None), Pass(1, 1.5, None)], 1024, lambda _: None, seconds=8.0)
    assert max(slow.samples) <= 8 and found.update_seconds == 0.5
