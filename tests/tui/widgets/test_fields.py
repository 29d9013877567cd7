"""Fields, lines that are painted where they differ, and themes that can be read."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.color import Color, ColorType
from tests.tui.support.page_checks import contrast
from textual import events
from textual.app import App, ComposeResult
from textual.theme import Theme

from trainctl.tui.text.styled_line import Piece, crop, line
from trainctl.tui.widgets import theme as themes
from trainctl.tui.widgets.fields import InputField
from trainctl.tui.widgets.line_view import changed_spans


class Field(App[None]):
    def compose(self) -> ComposeResult:
        yield InputField("note text=")


@pytest.mark.parametrize(
    ("pasted", "value"), [("two\r\n  lines\n", "two lines"), (" one ", " one "), ("\n", ""), ("a\n\nb", "a  b")]
)
async def test_pasted_lines_are_one(pasted: str, value: str) -> None:
    async with Field().run_test() as pilot:
        field = pilot.app.query_one(InputField)
        field.focus()
        await pilot.press("end")
        field.post_message(events.Paste(pasted))
        await pilot.press("x")
        assert field.value == f"note text={value}x"


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


GRAPHIC = {"rule", "band", "bar"}
"""Characters that are drawn, not written: lines between parts, the band behind a curve, bars whose number stands beside
them."""


@pytest.mark.parametrize(("theme", "least"), [(themes.NIGHT, 4.5), (themes.DAY, 4.5), (themes.CONTRAST, 7.0)],
                         ids=lambda item: getattr(item, "name", ""))  # fmt: skip
def test_every_role_can_be_read(theme: Theme, least: float) -> None:
    for role in themes.LOOKS:
        style = themes.style_of(role, theme.name)
        for ground in (theme.background, theme.surface):
            behind = style.bgcolor or Color.parse(ground or "")
            found = contrast(style.color.get_truecolor().hex, behind.get_truecolor().hex)
            assert found >= least or role in GRAPHIC, f"{role} on {ground}: {found:.2f}"


def test_the_terminal_s_theme_has_no_colour_but_its_sixteen() -> None:
    for role in themes.LOOKS:
        for color in (themes.style_of(role, "terminal").color, themes.style_of(role, "terminal").bgcolor):
            assert color is None or color.type in (ColorType.STANDARD, ColorType.DEFAULT), role


@pytest.mark.parametrize(
    ("environ", "name"),
    [
        ({"TERM": "xterm-256color"}, "night"),
        ({"TERM": "xterm-256color", "COLORFGBG": "0;15"}, "day"),
        ({"TERM": "rxvt", "COLORTERM": "truecolor", "COLORFGBG": "0;default;15"}, "day"),
        ({"TERM": "linux"}, "terminal"),
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, "terminal"),
        ({}, "terminal"),
    ],
)
def test_a_terminal_gets_the_theme_that_fits_it(environ: dict[str, str], name: str) -> None:
    assert themes.fitting(environ) == name
