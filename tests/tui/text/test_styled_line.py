"""Lines measured in terminal cells: cut, folded and wrapped without losing a word, and safe to show."""

from hypothesis import given
from hypothesis import strategies as st

from trainctl.tui.text import styled_line
from trainctl.tui.text.styled_line import Line, Piece, clean, width

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
