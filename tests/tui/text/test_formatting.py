"""Numbers and times as words: what is unknown is never a zero, and small values keep their digits."""

import datetime
import math
import os
import subprocess
import sys

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.tui.text import formatting
from trainctl.tui.text.ascii import in_same_cells, key_in_ascii, to_ascii

AT = datetime.datetime(2026, 11, 20, 14, 31, tzinfo=datetime.UTC).timestamp()
DAY = 86_400


@pytest.mark.parametrize(
    ("named", "plain"),
    [({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, True), ({"LANG": "C.UTF-8"}, False), ({}, False)],
    ids=str,
)
def test_ascii_is_for_a_locale_that_says_so(named: dict[str, str], plain: bool) -> None:
    """In a process of its own: Python's view of the locale is made as it starts."""
    kept = {name: value for name, value in os.environ.items() if name != "LANG" and not name.startswith("LC_")}
    environment = {**kept, **named, "PYTHONPATH": os.pathsep.join(sys.path)}
    program = "from trainctl.tui.text.ascii import locale_is_ascii; print(locale_is_ascii())"
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True, timeout=HANG_SECONDS)
    assert said.strip() == str(plain)


def test_ascii_has_no_other_character() -> None:
    assert to_ascii("8×3 → é ▇") == "8x3 -> ? #"
    assert in_same_cells("8×3 → é ▇ ≤2 漢 e\u0301 👩‍🚀|") == "8x3 > ? # <2 ?? ? ??|"
    assert key_in_ascii("⏎") == "enter"
    assert in_same_cells("⠁⠈⠒⠤⡀⡇⣿ ▁▄█") == "'''..:: _=#"


def test_unknown_is_never_a_zero() -> None:
    names = ("count", "rate", "compact", "loss", "scientific", "percent", "gigabytes", "seconds", "age", "duration")
    assert {getattr(formatting, name)(None) for name in names} == {"n/a"}
    assert formatting.used_of(None, 5e9) == formatting.eta(None, AT) == "n/a"
    assert formatting.clock(1e300, AT, datetime.UTC) == "n/a"


@pytest.mark.parametrize(
    "name", ["count", "rate", "compact", "loss", "scientific", "learning_rate", "percent", "gigabytes", "seconds"]
)
def test_what_is_no_number_is_not_unknown(name: str) -> None:
    said = [getattr(formatting, name)(value) for value in (math.nan, math.inf, -math.inf)]
    assert said == ["nan", "inf", "-inf"]
    assert any(char.isdigit() for char in getattr(formatting, name)(1e15))


def test_numbers_keep_the_digits_that_count() -> None:
    compact = [formatting.compact(value) for value in (0.0, 4.2, 842.0, 10_700.0, 999_960.0, 1.234e9)]
    assert compact == ["0", "4.2", "842", "10.7k", "1.0M", "1.2G"]
    assert [formatting.loss(value) for value in (1.8421, 345.67, math.nan, math.inf)] == [
        "1.842",
        "345.7",
        "nan",
        "inf",
    ]
    assert [formatting.learning_rate(value) for value in (2.9e-3, 2.96e-3, 0.0)] == ["2.90e-3", "2.96e-3", "0"]
    assert [formatting.scientific(value) for value in (1.62e-4, 3e-5, 0, 1.0)] == ["1.62e-4", "3e-5", "0", "1e0"]
    assert [formatting.used_of(41e9, 160e9), formatting.used_of(0.41e9, None)] == ["41/160", "0.41"]


def test_half_a_millisecond_is_not_nothing_and_long_times_have_their_units() -> None:
    assert [formatting.seconds(value) for value in (0.0, 2.5e-6, 0.0005, 0.0007)] == [
        "0 ms",
        "0.0025 ms",
        "0.5 ms",
        "1 ms",
    ]
    assert [formatting.duration(value) for value in (12, 260, 11100, 126_000)] == ["12s", "4m 20s", "3h 05m", "1d 11h"]
    assert [formatting.age(value) for value in (0.4, 119, 720, 260_000)] == ["0s", "119s", "12m", "3d"]


def test_a_clock_names_the_day_only_when_it_is_another() -> None:
    clock = [formatting.clock(at, AT, datetime.UTC) for at in (AT, AT + DAY, AT - 19 * DAY)]
    assert clock == ["14:31", "Sat 14:31", "1 Nov 14:31"]
    assert formatting.eta(126_000, AT, datetime.UTC) == "1d 11h, Sun 01:31"
