"""Lines of a view: what differs is painted, and nothing else."""

from hypothesis import given, settings
from hypothesis import strategies as st

from trainctl.tui.text.styled_line import Piece, crop, line
from trainctl.tui.widgets.line_view import changed_spans

PIECES = st.lists(
    st.builds(Piece, st.text("ab ", max_size=9), st.sampled_from(["text", "dim"]), st.sampled_from(["", "app.help"]))
)


def test_only_the_cells_that_differ_are_painted() -> None:
    assert changed_spans(line("step 118/150"), line("step 119/150")) == [(7, 1)]
    assert changed_spans(line("same"), line("same")) == []
    assert changed_spans(line("ab"), line("abcd")) == [(0, 4)]
    assert changed_spans(line("a漢b"), line("a漢c")) == [(0, 4)]
    apart = ["x" + " " * 30 + tail for tail in ("ab", "ac")]
    assert changed_spans(line(apart[0]), line("y" + apart[1][1:])) == [(0, 1), (32, 1)]
    assert changed_spans(line(Piece("a ", "dim")), line(Piece("a", "dim"), Piece(" ", "text"))) == []


@given(PIECES, PIECES)
@settings(max_examples=200, deadline=None)
def test_what_is_not_painted_is_the_same_in_both(old: list[Piece], new: list[Piece]) -> None:
    def cells(pieces: list[Piece]) -> list[tuple[str, str, str]]:
        return [(char, piece.role if char != " " else "", piece.action) for piece in pieces for char in piece.text]

    size = min(len(cells(old)), len(cells(new)))
    before, after = crop(old, size), crop(new, size)
    spans = changed_spans(before, after)
    painted = {index for start, count in spans for index in range(start, start + count)}
    pairs = list(zip(cells(list(before)), cells(list(after)), strict=True))
    assert {index for index, (a, b) in enumerate(pairs) if a != b} <= painted
    assert all(pairs[edge][0] != pairs[edge][1] for start, count in spans for edge in (start, start + count - 1))
