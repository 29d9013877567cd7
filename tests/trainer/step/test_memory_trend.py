"""The trend of a rank's memory over its last steps equals the plain arithmetic over them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.trainer.backends.memory import Memory
from trainctl.trainer.step.observer import TREND_STEPS, MemoryTrend


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=40), st.integers(1, 10**12))
def test_mean_and_slope_are_those_of_the_last_steps(peaks, cap):
    trend = MemoryTrend()
    for count, peak in enumerate(peaks, 1):
        found = trend.add(Memory(peak, peak, cap))
        last = peaks[max(0, count - TREND_STEPS) : count]
        assert found["memory_use"] == pytest.approx(sum(last) / len(last) / cap)
        assert ("memory_growth" in found) == (len(last) == TREND_STEPS)
        if len(last) == TREND_STEPS:
            assert found["memory_growth"] == pytest.approx(
                np.polyfit(range(TREND_STEPS), last, 1)[0], rel=1e-6, abs=0.01
            )


def test_what_cannot_be_read_says_nothing():
    trend = MemoryTrend()
    assert trend.add(Memory(1, None, 2)) == {}
    assert trend.add(Memory(1, 1, None)) == {}
    assert Memory(1, None, 3).values == {"memory_bytes": 1.0, "memory_cap_bytes": 3.0}
