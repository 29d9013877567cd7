"""What counts as sleep of a machine, by its clocks: pure."""

import pytest

from trainctl.node_agent.readings.sleep_clock import REPORT_SECONDS, Clocks, Sleep, SleepClock

NOW = Clocks(1_000_000.0, 500.0, 800.0)


def after(wall: float, monotonic: float, suspended: float | None) -> Clocks:
    """All clocks so many seconds on; None: a machine without one that counts a suspend."""
    return Clocks(NOW.wall + wall, NOW.monotonic + monotonic, None if suspended is None else 800.0 + suspended)


@pytest.mark.parametrize(
    ("moved", "seconds"),
    [
        (after(600.25, 0.25, 600.25), 600.25),  # suspended
        (after(0.25, 0.25, 3600.25), 3600.25),  # and its wall clock is set later
        (after(605.0, 5.0, 5.0), 605.0),  # stopped, as a virtual machine that is suspended
        (after(5.0, 5.0, 5.0), None),  # stopped for a while, and no clock says that more time passed
        (after(600.0, 0.25, 0.25), None),  # the wall clock was set
        (after(1.5, 0.5, 1.5), None),  # too short
    ],
)
def test_sleep_is_told_by_the_clocks(moved, seconds):
    sleep = SleepClock(NOW).look(moved)
    assert sleep == (None if seconds is None else Sleep(seconds, moved.wall, moved.monotonic))


def test_a_sleep_is_found_once_and_reported_for_a_while():
    clock, woke = SleepClock(NOW), after(605.0, 5.0, 5.0)
    assert clock.reported(NOW.monotonic) is None
    found = clock.look(woke)
    assert found is not None and clock.look(after(605.25, 5.25, 5.25)) is None
    assert clock.reported(woke.monotonic + REPORT_SECONDS - 1) == found
    assert clock.reported(woke.monotonic + REPORT_SECONDS) is None
