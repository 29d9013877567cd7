"""The line under a replay's screens: where it is, how fast it goes, and a slider to click on."""

from collections.abc import Callable, Sequence

from textual import events

from trainctl.protocol import messages as m
from trainctl.tui.commands.context import context_of
from trainctl.tui.replay.playhead import Playhead
from trainctl.tui.replay.replay_source import ReplaySource
from trainctl.tui.screens.base import StatusBar
from trainctl.tui.state.view_state import Clock
from trainctl.tui.text import formatting as f
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, fit, from_cells, line, width

_ROLES = {"error": "bad", "warning": "warning"}


def bar(
    head: Playhead, at: float, happened: Sequence[m.Event], clock: Clock, columns: int, glyphs: Glyphs
) -> tuple[Line, int, int]:
    """The line, and the first cell and the length of its slider. Faults and commands are marked on it."""
    ascii_only = glyphs.ascii_only
    sign = (">" if head.playing else "=") if ascii_only else ("▶" if head.playing else "‖")
    left = line(Piece(f"{sign} ", "accent"), Piece(f"{head.speed:g}{'x' if ascii_only else '×'} ", "label"))
    day = f.clock(at, clock.wall(), clock.zone)
    right = line(Piece(f" {head.step:,}", "strong"), Piece(f"/{head.last:,}", "label"), Piece(f"  {day}", "label"))
    size = max(columns - width(left) - width(right), 4)
    made = (*left, *from_cells(_track(head, happened, size, ascii_only)), *right)
    return fit(made, columns), width(left), size


def _track(head: Playhead, happened: Sequence[m.Event], size: int, ascii_only: bool) -> list[tuple[str, str]]:
    done, rest, mark, knob = ("=", "-", "!", "O") if ascii_only else ("━", "─", "╪", "●")
    place = cell_of(head, head.step, size)
    cells = [(done, "accent") if cell < place else (rest, "dim") for cell in range(size)]
    for event in happened:
        role = _ROLES.get(event.severity) or ("accent" if event.kind == "command" else "")
        if role and event.step:
            cells[cell_of(head, event.step, size)] = (mark, role)
    cells[place] = (knob, "strong")
    return cells


def cell_of(head: Playhead, step: int, size: int) -> int:
    part = (step - head.first) / max(head.last - head.first, 1)
    return min(max(round(part * (size - 1)), 0), size - 1)


def step_of(head: Playhead, cell: int, size: int) -> int:
    """The step that a cell of the slider stands for."""
    return head.first + round(min(max(cell / max(size - 1, 1), 0.0), 1.0) * (head.last - head.first))


class ReplayBar(StatusBar):
    """The slider; a click, or the mouse drawn along it, goes there."""

    def __init__(self, source: ReplaySource, go_to: Callable[[int], None], glyphs: Glyphs) -> None:
        super().__init__(glyphs, id="replay")
        self._source, self._go_to = source, go_to
        self._first_cell, self._cells = 0, 1

    def paint(self) -> None:
        source, clock = self._source, context_of(self).clock
        columns = self.app.size.width
        made, self._first_cell, self._cells = bar(
            source.head, source.at, source.events_known, clock, columns, self._glyphs
        )
        self.show([made])

    def on_mouse_down(self, event: events.MouseDown) -> None:
        self.capture_mouse()
        self._go(event.x)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        if event.button:
            self._go(event.x)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        self.release_mouse()

    def _go(self, x: int) -> None:
        self._go_to(step_of(self._source.head, x - self._first_cell, self._cells))
