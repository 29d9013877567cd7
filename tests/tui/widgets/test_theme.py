"""The themes: every role can be read on every ground that it stands on, and a terminal gets the one that fits it."""

import pytest
from rich.color import Color, ColorType
from tests.tui.support.page_checks import contrast
from textual.theme import Theme

from trainctl.tui.widgets import theme as themes

GRAPHIC = {"rule", "band", "bar"}
"""What is drawn, not written: lines between parts, the band behind a curve, bars whose number stands beside them."""


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
