"""How each role looks: a dark, a light, a high-contrast and a terminal-coloured theme. Colour only repeats what a word
or letter says."""

import dataclasses
from collections.abc import Mapping
from typing import Final

from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme

_NIGHT = {
    "text": "#c9d3df", "dim": "#75859b", "old": "italic #75859b",
    "label": "#8595a9", "strong": "bold #eef3f9", "good": "#7fd1a0",
    "warning": "bold #f0b866", "bad": "bold #ff7a7a", "accent": "#79b8ff", "title": "bold #9fb2c8",
    "rule": "#36424f", "axis": "#75859b", "mark": "#f0b866", "key": "bold #f0b866",
    "cursor": "bold #eef3f9 on #1e2a36", "bar": "#4f86c6", "band": "#2f5a88", "phase_d": "#e3a0ff",
    "phase_f": "#6fb3ff", "phase_b": "#5585dc", "phase_s": "#f0b866", "phase_o": "#7fd1a0", "phase_wait": "#75859b",
    "series0": "#6fb3ff", "series1": "#f0b866", "series2": "#7fd1a0", "series3": "#e3a0ff", "series4": "#5fd7d7",
    "series5": "#ff9e80", "series6": "#c5e06b", "series7": "#ff8ec6",
}  # fmt: skip
_DAY = {
    "text": "#24303c", "dim": "#617080", "old": "italic #617080",
    "label": "#5c6b7a", "strong": "bold #0b1016", "good": "#187546",
    "warning": "bold #9a5b00", "bad": "bold #b3261e", "accent": "#0b63c4", "title": "bold #3d4c5c",
    "rule": "#c3ccd6", "axis": "#617080", "mark": "#9a5b00", "key": "bold #9a5b00",
    "cursor": "bold #0b1016 on #dbe5f0", "bar": "#4f86c6", "band": "#9dc3ec", "phase_d": "#8a3ab9",
    "phase_f": "#0b63c4", "phase_b": "#123f8c", "phase_s": "#9a5b00", "phase_o": "#187546", "phase_wait": "#617080",
    "series0": "#0b63c4", "series1": "#9a5b00", "series2": "#187546", "series3": "#8a3ab9", "series4": "#00727d",
    "series5": "#b3401e", "series6": "#5f7300", "series7": "#b0246f",
}  # fmt: skip
_CONTRAST = {
    "text": "#ffffff", "dim": "#c8c8c8", "old": "italic #c8c8c8",
    "label": "#d8d8d8", "strong": "bold #ffffff", "good": "bold #5cff8f",
    "warning": "bold #ffd400", "bad": "bold #ff9a9a", "accent": "#7fdcff", "title": "bold #ffffff",
    "rule": "#9a9a9a", "axis": "#c8c8c8", "mark": "bold #ffd400", "key": "bold #ffd400",
    "cursor": "bold #000000 on #ffffff", "bar": "#7fb8ff", "band": "#5f8fd0", "phase_d": "#ffa8ff",
    "phase_f": "#7fdcff", "phase_b": "#9db8ff", "phase_s": "#ffd400", "phase_o": "#5cff8f", "phase_wait": "#c8c8c8",
    "series0": "#7fdcff", "series1": "#ffd400", "series2": "#5cff8f", "series3": "#ffa8ff", "series4": "#40ffe6",
    "series5": "#ffb08a", "series6": "#d8ff5c", "series7": "#ff9ac8",
}  # fmt: skip
_TERMINAL = {
    "text": "default", "dim": "bright_black", "label": "default", "strong": "bold", "good": "green",
    "warning": "bold yellow", "bad": "bold red", "accent": "cyan", "title": "bold", "rule": "bright_black",
    "axis": "bright_black", "mark": "yellow", "key": "bold yellow", "cursor": "reverse", "bar": "blue", "band": "blue",
    "old": "italic bright_black", "phase_d": "magenta", "phase_f": "cyan", "phase_b": "blue", "phase_s": "yellow",
    "phase_o": "green", "phase_wait": "bright_black", "series0": "cyan", "series1": "yellow", "series2": "green",
    "series3": "magenta", "series4": "blue", "series5": "red", "series6": "bright_green",
    "series7": "bright_magenta",
}  # fmt: skip

NIGHT: Final = Theme(
    name="night", primary="#6fb3ff", secondary="#4f7fd6", accent="#f0b866", warning="#f0b866", error="#ff7a7a",
    success="#7fd1a0", foreground="#c9d3df", background="#0e141b", surface="#131b24", panel="#1a2430", dark=True,
)  # fmt: skip
DAY: Final = Theme(
    name="day", primary="#0b63c4", secondary="#123f8c", accent="#9a5b00", warning="#9a5b00", error="#b3261e",
    success="#187546", foreground="#24303c", background="#f7f9fb", surface="#eef2f6", panel="#e3e9ef", dark=False,
)  # fmt: skip
CONTRAST: Final = Theme(
    name="contrast", primary="#7fdcff", secondary="#9db8ff", accent="#ffd400", warning="#ffd400", error="#ff9a9a",
    success="#5cff8f", foreground="#ffffff", background="#000000", surface="#000000", panel="#1c1c1c", dark=True,
)  # fmt: skip
TERMINAL: Final = dataclasses.replace(
    BUILTIN_THEMES["ansi-dark"], name="terminal", primary="ansi_cyan", accent="ansi_yellow"
)
THEMES: Final = (NIGHT, DAY, CONTRAST, TERMINAL)

_STYLES = {
    theme.name: {role: Style.parse(text) for role, text in table.items()}
    for theme, table in ((NIGHT, _NIGHT), (DAY, _DAY), (CONTRAST, _CONTRAST), (TERMINAL, _TERMINAL))
}
SERIES_ROLES: Final = tuple(f"series{index}" for index in range(8))


def style_of(role: str, theme: str) -> Style:
    """The look of a role. A theme that isn't ours looks like the terminal's own; an unknown role like text."""
    table = _STYLES.get(theme, _STYLES[TERMINAL.name])
    return table.get(role) or table["text"]


def roles() -> tuple[str, ...]:
    """Every role that there is."""
    return tuple(_STYLES[NIGHT.name])


def fitting(environ: Mapping[str, str]) -> str:
    """The theme for a terminal by what it says of itself: its own colours where it has no more than sixteen or none are
    wanted, the light one on a light ground."""
    if environ.get("NO_COLOR") is not None or _few_colors(environ):
        return TERMINAL.name
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    return DAY.name if ground in ("7", "15") else NIGHT.name


def _few_colors(environ: Mapping[str, str]) -> bool:
    term = environ.get("TERM", "")
    return environ.get("COLORTERM", "") not in ("truecolor", "24bit") and not any(
        word in term for word in ("256", "direct", "kitty", "alacritty", "ghostty", "wezterm")
    )
