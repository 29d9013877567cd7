"""Numbers and times as words, and lines measured in terminal cells."""

import datetime
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.waiting import HANG_SECONDS

from trainctl.tui.text import formatting as f
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.glyphs import ASCII, UNICODE, in_same_cells, key_in_ascii, to_ascii

LOCALES = [
    ({"LC_ALL": "C"}, True), ({"LC_ALL": "POSIX", "LANG": "C.UTF-8"}, True), ({"LANG": "C"}, True),
    ({"LANG": "C.UTF-8"}, False), ({"LANG": "C", "LC_ALL": "C.UTF-8"}, False), ({}, False),
]  # fmt: skip


@pytest.mark.parametrize(("named", "plain"), LOCALES, ids=str)
def test_ascii_is_for_a_locale_that_says_so(named: dict[str, str], plain: bool) -> None:
    """In a process of its own: Python's view of the locale is made as it starts."""
    kept = {name: value for name, value in os.environ.items() if name != "LANG" and not name.startswith("LC_")}
    program = "from trainctl.tui.text.glyphs import for_locale; print(for_locale().ascii_only)"
    done = subprocess.run(
        [sys.executable, "-c", program], env={**kept, **named, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True, text=True, check=True, timeout=HANG_SECONDS,
    )  # fmt: skip
    assert done.stdout.strip() == str(plain)


AT = datetime.datetime(2026, 11, 20, 14, 31, tzinfo=datetime.UTC).timestamp()


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "n/a"), (math.nan, "n/a"), (0.0, "0"), (842.0, "842"), (10_700.0, "10.7k"), (999_960.0, "1.0M"),
     (1.234e9, "1.2G"), (120_000.0, "120k"), (4.2, "4.2")],
)  # fmt: skip
def test_compact(value: float | None, text: str) -> None:
    assert f.compact(value) == text


def test_half_a_millisecond_and_less_is_not_nothing() -> None:
    found = [f.seconds(value) for value in (0.0, 2.5e-6, 0.00042, 0.0005, 0.0007)]
    assert found == ["0 ms", "0.0025 ms", "0.42 ms", "0.5 ms", "1 ms"]


def test_unknown_is_never_a_zero() -> None:
    words = (f.count, f.rate, f.compact, f.loss, f.scientific, f.percent, f.gigabytes, f.seconds, f.age, f.duration)
    assert {word(None) for word in words} == {"n/a"}
    assert f.used_of(None, 5e9) == "n/a"
    assert f.eta(None, AT) == "n/a"


def test_loss_keeps_four_digits_and_names_what_is_not_finite() -> None:
    texts = [f.loss(v) for v in (1.8421, 12.345, 345.67, math.nan, math.inf)]
    assert texts == ["1.842", "12.35", "345.7", "nan", "inf"]


def test_a_learning_rate_takes_as_many_cells_as_the_next() -> None:
    texts = [f.learning_rate(v) for v in (2.9e-3, 2.96e-3, 3e-3, 0.0, None)]
    assert texts == ["2.90e-3", "2.96e-3", "3.00e-3", "0", "n/a"]


def test_scientific() -> None:
    assert [f.scientific(v) for v in (1.62e-4, 3e-5, 0, 2e-3, 1.0)] == ["1.62e-4", "3e-5", "0", "2e-3", "1e0"]


def test_durations_and_ages() -> None:
    assert [f.duration(v) for v in (12, 260, 11100, 126_000)] == ["12s", "4m 20s", "3h 05m", "1d 11h"]
    assert [f.age(v) for v in (0.4, 1.0, 119, 720, 14_400, 260_000)] == ["0s", "1s", "119s", "12m", "4h", "3d"]


def test_clock_names_the_day_only_when_it_is_another() -> None:
    day = 86_400
    assert f.clock(AT, AT, datetime.UTC) == "14:31"
    assert f.clock(AT + day, AT, datetime.UTC) == "Sat 14:31"
    assert f.clock(AT - 19 * day, AT, datetime.UTC) == "1 Nov 14:31"
    assert f.eta(126_000, AT, datetime.UTC) == "1d 11h, Sun 01:31"
    assert f.clock(1e300, AT, datetime.UTC) == "n/a"


def test_memory_leaves_out_an_unknown_cap() -> None:
    assert f.used_of(41e9, 160e9) == "41/160"
    assert f.used_of(0.41e9, None) == "0.41"


@given(st.lists(st.tuples(st.text(max_size=12), st.sampled_from(["text", "dim"]))), st.integers(0, 40))
def test_fit_is_exact_whatever_the_text(parts: list[tuple[str, str]], columns: int) -> None:
    pieces = [ln.Piece(ln.clean(text), role) for text, role in parts]
    assert ln.width(ln.fit(pieces, columns)) == columns
    assert ln.width(ln.pad_left(pieces, columns)) == columns


@given(st.text(max_size=60), st.integers(0, 30))
def test_shorten_never_overflows(text: str, columns: int) -> None:
    text = ln.clean(text)
    assert ln.width((ln.Piece(ln.shorten(text, columns)),)) <= columns


@given(st.text(max_size=80), st.integers(2, 30))
def test_wrap_keeps_every_word_character(text: str, columns: int) -> None:
    rows = ln.wrap(ln.clean(text), columns)
    assert all(ln.width((ln.Piece(row),)) <= columns for row in rows)
    assert "".join("".join(rows).split()) == "".join(ln.clean(text).split())


@given(st.text(max_size=80), st.integers(2, 30))
def test_wrapped_lines_keep_every_word_and_fit(text: str, columns: int) -> None:
    rows = ln.wrap_lines(text, columns)
    assert all(ln.width((ln.Piece(row),)) <= columns for row in rows)
    assert "".join("".join(rows).split()) == "".join(ln.clean(text).split())


def test_wrapped_lines_of_a_program_keep_their_indentation() -> None:
    text = "def f():\n    return [first, second,  third]\n\n\tpass"
    assert ln.wrap_lines(text, 34) == text.replace("\t", "    ").split("\n")
    assert ln.wrap_lines(text, 20) == ["def f():", "    return [first,", "    second, third]", "", "    pass"]


def test_clean_takes_the_teeth_out_of_escape_sequences() -> None:
    assert "\x1b" not in ln.clean("\x1b]0;title\x07 note \x1b[31m")
    assert ln.clean("a\nb\tc\x9b") == "a b c "


def test_groups_drops_whole_groups_only() -> None:
    parts = [ln.line(text) for text in ("loss 1.84", "eval 1.90", "lr 1e-4")]
    assert ln.plain(ln.groups(parts, 21)) == "loss 1.84  eval 1.90"


def test_ascii_has_no_other_character() -> None:
    for value in vars(ASCII).values():
        assert not isinstance(value, str) or value.isascii()
    assert to_ascii("8×3 → é ▇") == "8x3 -> ? #"
    assert in_same_cells("8×3 → é ▇ ≤2 漢 e\u0301 👩‍🚀|") == "8x3 > ? # <2 ?? ? ??|"
    assert key_in_ascii("⏎") == "enter"
    assert len(UNICODE.sparks) == len(ASCII.sparks)
