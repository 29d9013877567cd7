"""`trainctl replay`: the same screens over a run directory, with a place in time that plays and is moved."""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.widgets import Input

from trainctl.protocol.messages import ACTIVE_RUN_STATES, Event, Heartbeat, Live, Snapshot
from trainctl.tui.app import launch
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.commands.context import context_of
from trainctl.tui.replay.replay_source import Playhead, ReplaySource
from trainctl.tui.screens.base import BaseScreen, StatusBar
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.state.view_state import Clock
from trainctl.tui.text import formatting
from trainctl.tui.text.styled_line import Line, Piece, fit, from_cells, line, width

_ROLES = {"error": "bad", "warning": "warning"}


def bar(head: Playhead, at: float, happened: Sequence[Event], clock: Clock, columns: int) -> tuple[Line, int, int]:
    """Return the line, and the first cell and the length of its slider. Faults and commands are marked on it."""
    sign = "▶" if head.playing else "‖"
    left = line(Piece(f"{sign} ", "accent"), Piece(f"{head.speed:g}× ", "label"))
    day = formatting.clock(at, clock.wall(), clock.zone)
    right = line(Piece(f" {head.step:,}", "strong"), Piece(f"/{head.last:,}", "label"), Piece(f"  {day}", "label"))
    size = max(columns - width(left) - width(right), 4)
    made = (*left, *from_cells(_track(head, happened, size)), *right)
    return fit(made, columns), width(left), size


def _track(head: Playhead, happened: Sequence[Event], size: int) -> list[tuple[str, str]]:
    place = cell_of(head, head.step, size)
    cells = [("━", "accent") if cell < place else ("─", "dim") for cell in range(size)]
    for event in happened:
        role = _ROLES.get(event.severity) or ("accent" if event.kind == "command" else "")
        if role and event.step:
            cells[cell_of(head, event.step, size)] = ("╪", role)
    cells[place] = ("●", "strong")
    return cells


def cell_of(head: Playhead, step: int, size: int) -> int:
    part = (step - head.first) / max(head.last - head.first, 1)
    return min(max(round(part * (size - 1)), 0), size - 1)


def step_of(head: Playhead, cell: int, size: int) -> int:
    """Return the step that a cell of the slider stands for."""
    return head.first + round(min(max(cell / max(size - 1, 1), 0.0), 1.0) * (head.last - head.first))


class ReplayBar(StatusBar):
    """The slider; a click, or the mouse drawn along it, goes there."""

    def __init__(self, source: ReplaySource, go_to: Callable[[int], None]) -> None:
        super().__init__(id="replay")
        self._source, self._go_to = source, go_to
        self._first_cell, self._cells = 0, 1

    def paint(self) -> None:
        source, clock = self._source, context_of(self).clock
        columns = self.app.size.width
        made, self._first_cell, self._cells = bar(source.head, source.at, source.events_known, clock, columns)
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


_FOR_RUNS = frozenset({"dialog", "command_line", "undo"})
"""Actions that change a run: this one is over."""
FAR_PART = 20
"""With shift a twentieth of the run at a time."""


class Stopwatch:
    """Seconds on the monotonic clock, less those in which it was paused."""

    def __init__(self) -> None:
        self._stood, self._looked = 0.0, time.monotonic()

    def look(self, *, runs: bool) -> float:
        """Return what it shows; `runs`: whether it ran since the last look."""
        now = time.monotonic()
        if not runs:
            self._stood += now - self._looked
        self._looked = now
        return now - self._stood


@dataclasses.dataclass(frozen=True)
class ReplayClock(Clock):
    """The time of day is that of the place; ages stand still while it does."""

    source: ReplaySource = dataclasses.field(kw_only=True)
    watch: Stopwatch = dataclasses.field(default_factory=Stopwatch, kw_only=True)

    def monotonic(self) -> float:
        return self.watch.look(runs=self.source.head.playing)

    def wall(self) -> float:
        return self.source.at


class ReplayApp(TrainctlApp):
    """Read-only, with a slider above the keys."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("space", "replay_play", "play/pause", tooltip="play or pause the replay"),
        Binding("left_square_bracket", "replay_step(-1)", "step back", show=False, tooltip="back by one step"),
        Binding("right_square_bracket", "replay_step(1)", "step", key_display="[ ]", tooltip="forward by one step"),
        Binding("left", "replay_arrow(-1)", "step back", show=False, tooltip="back by one step", priority=True),
        Binding("right", "replay_arrow(1)", "step forward", show=False, tooltip="forward by one step", priority=True),
        Binding("shift+left,left_curly_bracket", "replay_far(-1)", "back", show=False, tooltip="back by a twentieth"),
        Binding("shift+right,right_curly_bracket", "replay_far(1)", "on", show=False, tooltip="forward by a twentieth"),
        Binding("home", "replay_end(-1)", "start", show=False, tooltip="go to the first step"),
        Binding("end", "replay_end(1)", "end", show=False, tooltip="go to the last step"),
        Binding("plus,equals_sign", "replay_speed(2)", "faster", key_display="+", tooltip="twice as fast"),
        Binding("minus", "replay_speed(0.5)", "slower", key_display="-", tooltip="half as fast"),
    ]

    def __init__(self, source: ReplaySource, **options: Any) -> None:
        self.source = source
        options.setdefault("clock", ReplayClock(source=source))
        address = str(source.paths.directory)
        super().__init__(lambda: contextlib.nullcontext(source), read_only=True, address=address, **options)

    @property
    def badge(self) -> str:
        run = self.shown.run
        return "REPLAY SIMULATED" if run is not None and run.simulated else "REPLAY"

    def above_bottom(self) -> list[StatusBar]:
        return [ReplayBar(self.source, self.go_to)]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        if action == "replay_arrow":  # other screens' own keys
            return isinstance(self.screen, OverviewScreen) and not isinstance(self.focused, Input)
        if action.startswith("replay_"):
            return isinstance(self.screen, BaseScreen) and not isinstance(self.focused, Input)
        if action in _FOR_RUNS:
            return False
        return super().check_action(action, parameters)

    def go_to(self, step: int) -> None:
        self.source.seek(step)
        self.paint()

    def action_replay_play(self) -> None:
        before = self.source.head
        self.source.turn(before.toggled())
        if self.source.head.step != before.step:
            self.source.seek(self.source.head.step)
        self.paint()

    def action_replay_step(self, by: int) -> None:
        self.source.turn(dataclasses.replace(self.source.head, playing=False))
        self.go_to(self.source.head.step + by)

    def action_replay_arrow(self, by: int) -> None:
        self.action_replay_step(by)

    def action_replay_far(self, by: int) -> None:
        head = self.source.head
        self.go_to(head.step + by * max((head.last - head.first) // FAR_PART, 1))

    def action_replay_end(self, which: int) -> None:
        self.go_to(self.source.head.last if which > 0 else self.source.head.first)

    def action_replay_speed(self, times: float) -> None:
        self.source.turn(self.source.head.faster(times))
        self.paint()


def run_replay(directory: Path, speed: float) -> int:
    """Run the full screen until it is left, and return its exit status. Raises InvalidInputError for what can't be
    replayed."""
    with contextlib.closing(ReplaySource(directory, speed)) as source:
        found = launch.configuration()
        app = ReplayApp(source, **launch.options(found))
        name = source.paths.directory.resolve().name
        return launch.run(app, found, lambda: f"left the replay of {name} at step {source.head.step:,}")


class GrowingSource(ReplaySource):
    """A record that still grows: its end moves on until the run has ended, and the replay waits there for more."""

    def _advance(self, seconds: float) -> list[Live | Heartbeat | Snapshot]:
        if self.is_growing:
            self._look_again()
        played = self.head.playing
        made = super()._advance(seconds)
        if self.is_growing:
            self.head = dataclasses.replace(self.head, playing=played)
        return made

    @property
    def is_growing(self) -> bool:
        return self._view.state in ACTIVE_RUN_STATES

    def _look_again(self) -> None:
        """Take what the record has gained."""
        last = self._reader.last_step()
        if last is not None:
            self._view = self._read_view(self.head.first, last.step)
            self.head = dataclasses.replace(self.head, last=last.step).at(self.head.step, playing=self.head.playing)
            self.events_known += self._reader.all_events(self.events_known[-1].id if self.events_known else 0)
            self._samples_known = self._reader.all_samples()


def watch_growing(directory: Path, speed: float) -> int:
    """Run the full screen until it is left, and return its exit status. Raises InvalidInputError for what can't be
    shown."""
    with contextlib.closing(GrowingSource(directory, speed)) as source:
        found = launch.configuration()
        app = ReplayApp(source, **launch.options(found))
        return launch.run(app, found, lambda: f"left the simulated run at step {source.head.step:,}")
