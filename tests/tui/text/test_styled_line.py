"""What is too long for its row: folded at spaces and cut nowhere but in the last row it may take."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tui.support.driving import body, driven, until
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.protocol.messages.verbs import VERBS
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.help import key_rows
from trainctl.tui.text import styled_line as ln
from trainctl.tui.widgets.line_view import Lines

PIECES = st.lists(st.tuples(st.text(max_size=12), st.sampled_from(["text", "dim"])), max_size=8)


def said(app: TrainctlApp, where: str) -> list[str]:
    return [row.rstrip() for row in app.screen.query_one(where, Lines).shown]


@given(PIECES, st.integers(2, 30), st.integers(1, 4))
def test_a_folded_line_loses_only_blanks_and_what_is_past_its_last_row(
    parts: list[tuple[str, str]], columns: int, most: int
) -> None:
    pieces = ln.line(*(ln.Piece(ln.clean(text), role) for text, role in parts))
    rows = ln.folded(pieces, columns, most)
    assert 1 <= len(rows) <= most
    assert all(ln.width(row) <= columns for row in rows)
    had = [cell for cell in cells(pieces) if cell[0] != " "]
    kept = [cell for row in rows for cell in cells(row) if cell[0] != " "]
    whole = kept == had
    assert whole or (len(rows) == most and kept[-1][0] == "…" and kept[:-1] == had[: len(kept) - 1])


def cells(pieces: ln.Line) -> list[tuple[str, str]]:
    return [(char, role) for text, role, _ in pieces for char in text]


def test_a_line_is_broken_at_a_space_before_its_end() -> None:
    rows = ln.folded(ln.line(ln.Piece("aa", "bad"), " bbb cccc"), 6, 3)
    assert [ln.plain(row) for row in rows] == ["aa bbb", "cccc"]
    assert rows[0][0] == ln.Piece("aa", "bad")


async def test_what_is_wrong_with_a_command_is_told_whole_and_the_body_gives_up_the_rows() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        before = len(body(app).splitlines())
        await pilot.press("colon", *"frobnicate")
        await pilot.pause()
        rows = said(app, "#keys")
        assert len(rows) == 4
        assert rows[-1].split()[-1] == [*VERBS][-1], "the last of the verbs that there are"
        assert len(body(app).splitlines()) + len(rows) == before
        assert app.screen.query_one("#command").region.bottom == 24
        await pilot.press("escape")
        await pilot.pause()
        assert len(body(app).splitlines()) == before
        assert len(said(app, "#keys")) == 1

    await driven(source_of(4), play)


async def test_the_beginning_of_a_verb_shows_those_that_begin_so() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("colon", *"dr")
        await until(pilot, lambda: said(app, "#keys") == ["drain --node NODE"])
        await pilot.press("backspace", "backspace", *"res")
        await until(pilot, lambda: said(app, "#keys") == ["resize-batch micro=; resume"])
        await pilot.press("x")
        await until(pilot, lambda: said(app, "#keys")[0].startswith("verb: unknown verb 'resx'"))

    await driven(source_of(4), play)


async def test_the_fields_of_a_filter_are_told_whole() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        before = len(body(app).splitlines())
        await pilot.press("slash")
        await pilot.pause()
        rows = said(app, "#filter-note")
        assert " ".join(rows) == f"fields: {app.screen.query_one('FilterBar').table.names}"  # type: ignore[attr-defined]
        assert len(rows) > 1
        assert len(body(app).splitlines()) + len(rows) + 1 == before
        await pilot.press("escape")
        assert len(body(app).splitlines()) == before

    await driven(source_of(4), play)


@pytest.mark.parametrize(
    ("state", "key", "size", "told"),
    [
        ("finished", "b", (80, 24), "the run has ended, so resize-batch can't act on it esc closes"),
        ("running", "b", (60, 15), "forward/backward pass (speed and memory) leaves"),
        ("running", "x", (60, 15), "it can be resumed stop it? y/N"),
    ],
)
async def test_a_dialog_s_lines_are_told_whole(state: str, key: str, size: tuple[int, int], told: str) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("1", key)
        await until(pilot, lambda: bool(app.screen.query("#dialog-text")))
        await pilot.pause()
        shown = app.screen.query_one("#dialog-text", Lines)
        assert told in " ".join(" ".join(shown.shown).split())
        assert all(ln.cell_len(row) <= shown.size.width for row in shown.shown)
        await pilot.resize_terminal(120, 40)
        await until(pilot, lambda: app.screen.query_one("#dialog-text").size.width > 60)
        assert told in " ".join(" ".join(shown.shown).split())

    await driven(source_of(1, state=state), play, size=size)


def test_words_too_long_for_help_s_columns_go_on_below() -> None:
    keys = [("b", "batch"), ("alt+f", "a word to the right in whatever text is being typed"), ("s", "split")]
    rows = [ln.plain(row) for row in key_rows(keys)]
    assert not any("…" in row for row in rows)
    assert len({ln.width(row) for row in key_rows(keys)}) == 1
    words = " ".join(rows).split()
    assert [words.count(word) for word in ("batch", "split", "whatever", "typed")] == [1, 1, 1, 1]


async def test_help_is_one_column_in_a_narrow_window_and_two_in_a_wider_one() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("question_mark")
        await pilot.pause()
        narrow = said(app, "#dialog-text")
        await pilot.resize_terminal(80, 24)
        await pilot.pause()
        wide = said(app, "#dialog-text")
        assert len(narrow) > len(wide)
        assert "own speed" in " ".join(narrow)
        assert sum("a row for each rank" in row for row in narrow + wide) == 2

    await driven(source_of(4), play, (62, 24))
