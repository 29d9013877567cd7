"""Waits end by a busy machine's measure, and never without an end."""

import os
import time
from pathlib import Path

import pytest
from tests import waiting
from tests.waiting import MOST_RESTARTS, Patience, until


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """A machine of two cores, its time and its load."""
    now = {"seconds": 0.0, "load": 0.0, "runnable": 0.0}
    monkeypatch.setattr(time, "monotonic", lambda: now["seconds"])
    monkeypatch.setattr(os, "getloadavg", lambda: (now["load"], 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(waiting, "runnable", lambda: now["runnable"])
    return now


def seconds_until_over(patience: Patience, clock: dict[str, float], progress: object = None) -> float:
    begun = clock["seconds"]
    while not patience.is_over(progress() if callable(progress) else progress):
        clock["seconds"] += 1.0
    return clock["seconds"] - begun


@pytest.mark.parametrize(("load", "seconds"), [(0.0, 61), (2.0, 61), (8.0, 241)])
@pytest.mark.parametrize("measure", ["load", "runnable"])
def test_a_busy_machine_has_longer(clock: dict[str, float], measure: str, load: float, seconds: float) -> None:
    """Also one that has been busy for a moment only, whose mean load is still low."""
    clock[measure] = load
    assert seconds_until_over(Patience(60), clock) == seconds


def test_this_test_wants_a_core() -> None:
    assert waiting.runnable() >= 1 or not Path("/proc/loadavg").exists()


def test_what_gets_on_has_longer_but_not_for_ever(clock: dict[str, float]) -> None:
    assert seconds_until_over(Patience(60), clock, lambda: clock["seconds"] < 40) == 40 + 61
    assert seconds_until_over(Patience(60), clock, lambda: clock["seconds"]) == MOST_RESTARTS * 60 + 1


def test_a_short_wait_is_as_long_as_a_process_may_take_to_start(clock: dict[str, float]) -> None:
    assert seconds_until_over(Patience(2), clock) == waiting.LEAST_SECONDS + 1


def test_a_failure_says_what_was_waited_for_and_how_far_it_came(clock: dict[str, float]) -> None:
    def look() -> bool:
        clock["seconds"] += 5.0
        return False

    with pytest.raises(AssertionError, match=r"^step 9 did not come within \d+ s, 60 s on a quiet machine: step 4$"):
        until(look, 60, "step 9", lambda: "step 4")
