"""The pure parts of a simulated rank: its device, its link, its loss and what it has done by a moment."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.node_agent.simulate.models import DeviceModel, DeviceSpec, SimulatedLinks
from trainctl.node_agent.simulate.simulated_reports import done_by, first_positions
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.calibration.profile import LinkRate
from trainctl.protocol.config.cluster_file import SimulatedNode
from trainctl.protocol.messages import Range

sizes = st.integers(1, 64)
rates = st.floats(0.1, 1000)


def device(rate: float = 10.0, seed: int = 0, cap: float | None = None, **settings) -> DeviceModel:
    node = SimulatedNode(samples_per_second=rate, **settings)
    memory = MemoryModel(1e9, 1e8)
    spec = DeviceSpec("simulated device", PassCurve.line(0.0, 1 / rate), 0.01, memory, cap, None)
    return DeviceModel(spec, node, seed, "a")


@given(rates, sizes, sizes, sizes)
def test_without_noise_a_part_takes_what_its_samples_take(rate, samples, more, micro):
    quiet = device(rate, noise=0.0)
    part, larger = quiet.part(1, samples, micro, 0.0), quiet.part(2, samples + more, micro, 1.0)
    assert part.busy == pytest.approx(samples / rate)
    assert larger.busy > part.busy
    assert part.backward == pytest.approx(2 * part.forward)


@given(sizes, st.floats(1.1e9, 5e9))
def test_what_a_part_holds_fits_in_memory(micro, cap):
    part = device(cap=cap).part(1, 64, micro, 0.0)
    assert part.peak_bytes is not None and part.peak_bytes <= cap
    assert 1 <= part.micro <= micro
    assert (part.replays > 0) == (part.micro < micro)


def test_noise_and_failures_are_of_the_size_that_the_settings_say():
    noisy = device(noise=0.1, mtbf_hours=2.0)
    times = [noisy.part(step, 8, 4, 0.0).busy for step in range(4000)]
    mean = sum(times) / len(times)
    assert mean == pytest.approx(0.8, rel=0.02)
    spread = (sum((seconds - mean) ** 2 for seconds in times) / len(times)) ** 0.5
    assert spread / mean == pytest.approx(0.1, rel=0.1)
    lives = [noisy.seconds_to_failure() for _ in range(4000)]
    assert sum(lives) / len(lives) == pytest.approx(7200, rel=0.1)


def links(rate: float, latency: float, ranks: int, size: int) -> SimulatedLinks:
    return SimulatedLinks({rank: LinkRate("b", rate, rate, latency) for rank in range(ranks)}, size, 3 * size)


@given(st.floats(1e6, 1e10), st.floats(1e-6, 0.1), st.integers(2, 64), st.integers(1, 10**10))
def test_a_sum_takes_no_less_over_more_ranks_or_more_bytes(rate, latency, ranks, size):
    made = links(rate, latency, ranks, size)
    everyone = [*range(ranks)]
    assert made.sum_seconds(everyone[:1]) == 0
    assert 0 < made.sum_seconds(everyone[:2]) <= made.sum_seconds(everyone) * (1 + 1e-9)
    assert made.sum_seconds(everyone) < links(rate, latency, ranks, 2 * size).sum_seconds(everyone)
    assert made.sum_seconds(everyone) > 2 * (ranks - 1) / ranks * size / rate


def test_the_slowest_link_holds_up_the_sum():
    made = links(1e9, 1e-4, 3, 10**9)
    slow = dataclasses.replace(made, of={**made.of, 2: LinkRate("b", 1e8, 1e8, 1e-4)})
    assert slow.sum_seconds([0, 1, 2]) == pytest.approx(4 / 3 * 10, rel=0.01)
    assert slow.transfer_seconds([0, 1, 2]) == pytest.approx(30)


pieces = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 30)), min_size=1, max_size=5)


def laid_out(gaps: list[tuple[int, int]]) -> tuple[Range, ...]:
    at, found = 0, []
    for gap, count in gaps:
        found.append(Range(at + gap, count))
        at += gap + count
    return tuple(found)


def positions(ranges) -> list[int]:
    return [position for piece in ranges for position in range(piece.start, piece.start + piece.count)]


@given(pieces, st.integers(0, 200), sizes, st.floats(0, 1.5))
def test_what_is_done_by_a_moment_are_whole_passes_from_the_start(gaps, count, micro, fraction):
    left = laid_out(gaps)
    assert positions(first_positions(left, count)) == positions(left)[:count]
    part = device(noise=0.0).part(1, len(positions(left)), micro, 0.0)
    done = positions(done_by(left, part, fraction * part.busy))
    assert done == positions(left)[: len(done)]
    assert len(done) % part.micro == 0 or len(done) == len(positions(left))
    assert (len(done) == len(positions(left))) or fraction < 1
