"""Updates of the terminal when parts of the screen change: those cells alone, and of their style what differs.

Textual writes a changed stretch from the beginning of its widget's line, and each piece's colours in full: some four
times as much, which a slow line feels.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from rich.color import ColorSystem
from rich.console import COLOR_SYSTEMS, Console, ConsoleOptions, RenderableType, RenderResult
from rich.segment import Segment
from rich.style import Style
from textual._compositor import ChopsUpdate, CompositorUpdate
from textual.strip import Strip

_SHOWN_ON_SPACES = "underline", "underline2", "overline", "reverse", "strike"
_ATTRIBUTES = {
    "bold": "1",
    "dim": "2",
    "italic": "3",
    "underline": "4",
    "blink": "5",
    "reverse": "7",
    "strike": "9",
    "underline2": "21",
    "overline": "53",
}
_NOTHING = Style()


@dataclass(frozen=True)
class Codes:
    """A style as a terminal is given it."""

    attributes: frozenset[str]
    foreground: str
    background: str
    on_spaces: bool  # whether a space shows more of it than the background


@functools.lru_cache(4096)
def codes_of(style: Style, system: ColorSystem) -> Codes:
    foreground, background = style.color, style.bgcolor
    names = [name for name in _ATTRIBUTES if getattr(style, name)]
    return Codes(
        frozenset(_ATTRIBUTES[name] for name in names),
        ";".join(foreground.downgrade(system).get_ansi_codes()) if foreground else "",
        ";".join(background.downgrade(system).get_ansi_codes(foreground=False)) if background else "",
        any(name in names for name in _SHOWN_ON_SPACES),
    )


@functools.lru_cache(4096)
def turn(before: Codes, after: Codes) -> str:
    """Return the sequence that turns one style into another."""
    if before == after:
        return ""
    gone = before.attributes - after.attributes
    lost = (before.foreground and not after.foreground) or (before.background and not after.background)
    if gone or lost:
        parts = ["0", *sorted(after.attributes), after.foreground, after.background]
    else:
        parts = sorted(after.attributes - before.attributes)
        parts += [after.foreground] if after.foreground != before.foreground else []
        parts += [after.background] if after.background != before.background else []
    return f"\x1b[{';'.join(part for part in parts if part)}m"


class SpanUpdate(CompositorUpdate):
    """Textual's own update, written in fewer bytes."""

    def __init__(self, update: ChopsUpdate) -> None:
        self._update = update

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._update.__rich_console__(console, options)

    def render_segments(self, console: Console) -> str:
        """Return the terminal's sequences for all spans."""
        return write(self._stretches(), console)

    def _stretches(self) -> Iterator[tuple[int, int, Strip]]:
        update = self._update
        for y, x1, x2 in update.spans:
            for end, (x, strip) in zip(update.chop_ends[y], update.chops[y].items(), strict=False):
                if strip is not None and x < x2 and end > x1:
                    first = max(x, x1)
                    yield y, first, strip.crop(first - x, min(end, x2) - x)


def compact(update: RenderableType | None) -> RenderableType | None:
    """Return what Textual is about to write, in fewer bytes where it is parts of the screen."""
    return SpanUpdate(update) if isinstance(update, ChopsUpdate) else update


def write(stretches: Iterable[tuple[int, int, Iterable[Segment]]], console: Console) -> str:
    """Return the sequences for stretches of the screen, each (row, column, what is there), by rows."""
    system = COLOR_SYSTEMS[console.color_system or "truecolor"]
    made: list[str] = []
    state = nothing = codes_of(_NOTHING, system)
    last = -1
    for row, column, segments in stretches:
        made.append(f"\x1b[{column + 1}G" if row == last else f"\x1b[{row + 1};{column + 1}H")
        last = row
        state = _write(segments, state, system, made)
    made.append(turn(state, nothing))
    return "".join(made)


def _write(segments: Iterable[Segment], state: Codes, system: ColorSystem, made: list[str]) -> Codes:
    """Add segments' text to what is made; gives the style that the terminal is left in."""
    for text, style, control in segments:
        if control:
            continue
        wanted = codes_of(style or _NOTHING, system)
        blank = not wanted.on_spaces and not state.on_spaces and wanted.background == state.background
        if not (blank and text.isspace()):
            made.append(turn(state, wanted))
            state = wanted
        made.append(text)
    return state
