"""Text: numbers and times as words, figures by one name, and lines measured in terminal cells."""

import datetime
import math
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tui.support.driving import dialog_text, running
from tests.tui.support.recorded import source_of
from tests.waiting import HANG_SECONDS

from trainctl.tui.text import formatting, run_lines, styled_line
from trainctl.tui.text.ascii import in_same_cells, key_in_ascii, to_ascii
from trainctl.tui.text.styled_line import Line, Piece, clean, width

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


async def test_help_has_every_figure_and_word() -> None:
    async with running(source_of(4), size=(120, 60)) as (pilot, app):
        await pilot.press("question_mark")
        said = " ".join(dialog_text(app).split())
        for figure in (*run_lines.FIGURES, *run_lines.WORDS):
            assert " ".join(f"{figure.label} {figure.meaning}".split()) in said


PIECES = st.lists(st.tuples(st.text(max_size=12), st.sampled_from(["text", "dim"])), max_size=8)


@given(PIECES, st.integers(0, 40))
def test_a_line_is_as_wide_as_it_shall_be_whatever_the_text(parts: list[tuple[str, str]], columns: int) -> None:
    pieces = [Piece(clean(text), role) for text, role in parts]
    assert width(styled_line.fit(pieces, columns)) == width(styled_line.pad_left(pieces, columns)) == columns
    assert width((Piece(styled_line.shorten("".join(piece.text for piece in pieces), columns)),)) <= columns


@given(st.text(max_size=80), st.integers(2, 30))
def test_wrapped_text_keeps_every_word_and_fits(text: str, columns: int) -> None:
    for rows in (styled_line.wrap(clean(text), columns), styled_line.wrap_lines(text, columns)):
        assert all(width((Piece(row),)) <= columns for row in rows)
        assert "".join("".join(rows).split()) == "".join(clean(text).split())


def test_wrapped_lines_of_a_program_keep_their_indentation() -> None:
    text = "def f():\n    return [first, second,  third]\n\n\tpass"
    assert styled_line.wrap_lines(text, 34) == text.replace("\t", "    ").split("\n")
    folded = ["def f():", "    return [first,", "    second, third]", "", "    pass"]
    assert styled_line.wrap_lines(text, 20) == folded


@given(PIECES, st.integers(2, 30), st.integers(1, 4))
def test_a_folded_line_loses_only_blanks_and_what_is_past_its_last_row(
    parts: list[tuple[str, str]], columns: int, most: int
) -> None:
    pieces = styled_line.line(*(Piece(clean(text), role) for text, role in parts))
    rows = styled_line.folded(pieces, columns, most)
    assert 1 <= len(rows) <= most
    assert all(width(row) <= columns for row in rows)
    had, kept = cells(pieces), [cell for row in rows for cell in cells(row)]
    assert kept == had or (len(rows) == most and kept[-1][0] == "…" and kept[:-1] == had[: len(kept) - 1])


def cells(pieces: Line) -> list[tuple[str, str]]:
    """Each character but blanks, with its role."""
    return [(char, role) for text, role, _ in pieces for char in text if char != " "]


def test_clean_takes_the_teeth_out_of_escape_sequences() -> None:
    assert "\x1b" not in clean("\x1b]0;title\x07 note \x1b[31m")
    assert clean("a\nb\tc\x9b") == "a b c "


def test_groups_drops_whole_groups_only() -> None:
    parts = [styled_line.line(text) for text in ("loss 1.84", "eval 1.90", "lr 1e-4")]
    assert styled_line.plain(styled_line.groups(parts, 21)) == "loss 1.84  eval 1.90"
