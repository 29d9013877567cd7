"""How each role looks: a dark, a light and a terminal-coloured theme. Colour only repeats what a word or letter
says."""

import dataclasses
from typing import Final

from rich.style import Style
from textual.theme import BUILTIN_THEMES, Theme

_NIGHT = {
    "text": "#c9d3df", "dim": "#66758a", "old": "italic #66758a",
    "label": "#8595a9", "strong": "bold #eef3f9", "good": "#7fd1a0",
    "warning": "bold #f0b866", "bad": "bold #ff7a7a", "accent": "#79b8ff", "title": "bold #9fb2c8",
    "rule": "#36424f", "axis": "#66758a", "mark": "#f0b866", "key": "bold #f0b866",
    "cursor": "bold #eef3f9 on #1e2a36", "bar": "#4f86c6", "band": "#2f5a88", "phase_d": "#e3a0ff",
    "phase_f": "#6fb3ff", "phase_b": "#4f7fd6", "phase_s": "#f0b866", "phase_o": "#7fd1a0", "phase_wait": "#66758a",
    "series0": "#6fb3ff", "series1": "#f0b866", "series2": "#7fd1a0", "series3": "#e3a0ff", "series4": "#5fd7d7",
    "series5": "#ff9e80", "series6": "#c5e06b", "series7": "#ff8ec6",
}  # fmt: skip
_DAY = {
    "text": "#24303c", "dim": "#7c8a99", "old": "italic #7c8a99",
    "label": "#5c6b7a", "strong": "bold #0b1016", "good": "#1b7f4b",
    "warning": "bold #9a5b00", "bad": "bold #b3261e", "accent": "#0b63c4", "title": "bold #3d4c5c",
    "rule": "#c3ccd6", "axis": "#7c8a99", "mark": "#9a5b00", "key": "bold #9a5b00",
    "cursor": "bold #0b1016 on #dbe5f0", "bar": "#4f86c6", "band": "#9dc3ec", "phase_d": "#8a3ab9",
    "phase_f": "#0b63c4", "phase_b": "#123f8c", "phase_s": "#9a5b00", "phase_o": "#1b7f4b", "phase_wait": "#7c8a99",
    "series0": "#0b63c4", "series1": "#9a5b00", "series2": "#1b7f4b", "series3": "#8a3ab9", "series4": "#00727d",
    "series5": "#b3401e", "series6": "#5f7300", "series7": "#b0246f",
}  # fmt: skip
_TERMINAL = {
    "text": "default", "dim": "bright_black", "label": "default", "strong": "bold", "good": "green",
    "bad": "bold red", "accent": "cyan", "title": "bold", "rule": "bright_black", "axis": "bright_black",
    "mark": "yellow", "key": "bold yellow", "cursor": "reverse", "bar": "blue", "band": "blue",
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
    success="#1b7f4b", foreground="#24303c", background="#f7f9fb", surface="#eef2f6", panel="#e3e9ef", dark=False,
)  # fmt: skip
TERMINAL: Final = dataclasses.replace(
    BUILTIN_THEMES["ansi-dark"], name="terminal", primary="ansi_cyan", accent="ansi_yellow"
)
THEMES: Final = (NIGHT, DAY, TERMINAL)

_STYLES = {
    theme.name: {role: Style.parse(text) for role, text in table.items()}
    for theme, table in ((NIGHT, _NIGHT), (DAY, _DAY), (TERMINAL, _TERMINAL))
}
SERIES_ROLES: Final = tuple(f"series{index}" for index in range(8))


def style_of(role: str, theme: str) -> Style:
    """The look of a role. A theme that isn't ours looks like the terminal's own; an unknown role like text."""
    table = _STYLES.get(theme, _STYLES[TERMINAL.name])
    return table.get(role) or table["text"]
