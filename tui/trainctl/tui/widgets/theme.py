"""Looks of each role: a dark, a light, a high-contrast and a terminal-coloured theme. Colour only repeats what a word
or letter says."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme

LOOKS = {
    "text": ("#c9d3df", "#24303c", "#ffffff", "default"),
    "dim": ("#75859b", "#617080", "#c8c8c8", "bright_black"),
    "old": ("italic #75859b", "italic #617080", "italic #c8c8c8", "italic bright_black"),
    "label": ("#8595a9", "#5c6b7a", "#d8d8d8", "default"),
    "strong": ("bold #eef3f9", "bold #0b1016", "bold #ffffff", "bold"),
    "good": ("#7fd1a0", "#187546", "bold #5cff8f", "green"),
    "warning": ("bold #f0b866", "bold #9a5b00", "bold #ffd400", "bold yellow"),
    "bad": ("bold #ff7a7a", "bold #b3261e", "bold #ff9a9a", "bold red"),
    "accent": ("#79b8ff", "#0b63c4", "#7fdcff", "cyan"),
    "title": ("bold #9fb2c8", "bold #3d4c5c", "bold #ffffff", "bold"),
    "rule": ("#36424f", "#c3ccd6", "#9a9a9a", "bright_black"),
    "mark": ("#f0b866", "#9a5b00", "bold #ffd400", "yellow"),
    "key": ("bold #f0b866", "bold #9a5b00", "bold #ffd400", "bold yellow"),
    "cursor": ("bold #eef3f9 on #1e2a36", "bold #0b1016 on #dbe5f0", "bold #000000 on #ffffff", "reverse"),
    "bar": ("#4f86c6", "#4f86c6", "#7fb8ff", "blue"),
    "band": ("#2f5a88", "#9dc3ec", "#5f8fd0", "blue"),
    "phase_b": ("#5585dc", "#123f8c", "#9db8ff", "blue"),
    "series0": ("#6fb3ff", "#0b63c4", "#7fdcff", "cyan"),
    "series1": ("#f0b866", "#9a5b00", "#ffd400", "yellow"),
    "series2": ("#7fd1a0", "#187546", "#5cff8f", "green"),
    "series3": ("#e3a0ff", "#8a3ab9", "#ffa8ff", "magenta"),
    "series4": ("#5fd7d7", "#00727d", "#40ffe6", "blue"),
    "series5": ("#ff9e80", "#b3401e", "#ffb08a", "red"),
    "series6": ("#c5e06b", "#5f7300", "#d8ff5c", "bright_green"),
    "series7": ("#ff8ec6", "#b0246f", "#ff9ac8", "bright_magenta"),
}
"""Looks of each role in the themes night, day, contrast and terminal."""
LOOKS |= {
    "axis": LOOKS["dim"],
    "phase_wait": LOOKS["dim"],
    "phase_d": LOOKS["series3"],
    "phase_f": LOOKS["series0"],
    "phase_s": LOOKS["series1"],
    "phase_o": LOOKS["series2"],
}

_COLORS = {
    "primary": ("#6fb3ff", "#0b63c4", "#7fdcff"),
    "secondary": ("#4f7fd6", "#123f8c", "#9db8ff"),
    "accent": ("#f0b866", "#9a5b00", "#ffd400"),
    "warning": ("#f0b866", "#9a5b00", "#ffd400"),
    "error": ("#ff7a7a", "#b3261e", "#ff9a9a"),
    "success": ("#7fd1a0", "#187546", "#5cff8f"),
    "foreground": ("#c9d3df", "#24303c", "#ffffff"),
    "background": ("#0e141b", "#f7f9fb", "#000000"),
    "surface": ("#131b24", "#eef2f6", "#000000"),
    "panel": ("#1a2430", "#e3e9ef", "#1c1c1c"),
}
"""Textual's own colours in the themes night, day and contrast."""


def _theme(name: str, place: int, *, dark: bool = True) -> Theme:
    colors: dict[str, Any] = {color: looks[place] for color, looks in _COLORS.items()}
    return Theme(name=name, dark=dark, **colors)


NIGHT: Final = _theme("night", 0)
DAY: Final = _theme("day", 1, dark=False)
CONTRAST: Final = _theme("contrast", 2)
TERMINAL: Final = dataclasses.replace(
    BUILTIN_THEMES["ansi-dark"], name="terminal", primary="ansi_cyan", accent="ansi_yellow"
)
THEMES: Final = (NIGHT, DAY, CONTRAST, TERMINAL)

_SERIES = 8
_STYLES = {
    theme.name: {role: Style.parse(looks[place]) for role, looks in LOOKS.items()} for place, theme in enumerate(THEMES)
}


def rank_role(place: int) -> str:
    """Return the colour of a run's rank, in every chart and table, by its place among the ranks."""
    return f"series{place % _SERIES}"


def run_role(place: int) -> str:
    """Return the colour of a line of the whole run, such as the loss and its evaluation: none of the first ranks'."""
    return "text" if place == 0 else f"series{-place % _SERIES}"


def style_of(role: str, theme: str) -> Style:
    """Return the look of a role. A theme that isn't ours looks like the terminal's own; an unknown role like text."""
    table = _STYLES.get(theme, _STYLES[TERMINAL.name])
    return table.get(role) or table["text"]


def fitting(environ: Mapping[str, str]) -> str:
    """Return the terminal's theme: its own colours where it has no more than sixteen or none are wanted, the
    light one on a light ground."""
    if environ.get("NO_COLOR") is not None or _few_colors(environ):
        return TERMINAL.name
    ground = environ.get("COLORFGBG", "").rpartition(";")[2]
    return DAY.name if ground in ("7", "15") else NIGHT.name


def _few_colors(environ: Mapping[str, str]) -> bool:
    term = environ.get("TERM", "")
    return environ.get("COLORTERM", "") not in ("truecolor", "24bit") and not any(
        word in term for word in ("256", "direct", "kitty", "alacritty", "ghostty", "wezterm")
    )
