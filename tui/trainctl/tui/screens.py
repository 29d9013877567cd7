"""The screens: Overview, Runs, Events and Help. Each makes lines from the app's state and hands them to one widget."""

import abc
from itertools import zip_longest
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.screen import ModalScreen, Screen
from textual.widgets import Input

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.tui import events_panel, header, overview, runs_view
from trainctl.tui.bottom import Bottom
from trainctl.tui.lines import Line, Piece, fit, line, rule
from trainctl.tui.widgets import Field, Lines

if TYPE_CHECKING:
    from trainctl.tui.app import TrainctlApp

EVENTS_PAGE = 500
RUNS_REFRESH_SECONDS = 5.0


class BaseScreen(Screen[None]):
    """A body of lines over the bottom line; `paint` brings both up to date."""

    AUTO_FOCUS = ""

    @property
    def owner(self) -> "TrainctlApp":
        return cast("TrainctlApp", self.app)

    def compose(self) -> ComposeResult:
        yield Lines(self.owner.glyphs, id="body")
        yield Bottom(self.owner.glyphs)

    def on_resize(self, event: events.Resize) -> None:
        self.paint()

    def on_screen_resume(self) -> None:
        self.paint()

    def paint(self) -> None:
        """Draws the present state; below the least size one line says so."""
        columns, rows = self.size
        if not self.query("#body"):  # a tick can come before the first compose, or after the last one is gone
            return
        body = self.query_one("#body", Lines)
        small = overview.too_small(columns, rows)
        bottom = self.query_one(Bottom)
        bottom.display = small is None
        if small is not None:
            body.show([line(small)])
        elif rows and columns:
            body.show(self.lines(columns, rows - bottom.rows))
            bottom.paint()

    @abc.abstractmethod
    def lines(self, columns: int, rows: int) -> list[Line]:
        """The body: exactly `rows` lines of `columns` cells."""


class OverviewScreen(BaseScreen):
    """One run on one page."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "choose(1)", "next node", show=False),
        Binding("up,k", "choose(-1)", "previous node", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._charts = overview.ChartCache()

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        return overview.lines(
            owner.shown,
            owner.clock,
            columns,
            rows,
            owner.glyphs,
            selected=owner.selected,
            badge=owner.badge,
            address=owner.address,
            cache=self._charts,
        )

    def action_choose(self, by: int) -> None:
        """Moves the choice among the ranks; dialogs start from the chosen one."""
        self.owner.choose(by)
        self.paint()


class RunsScreen(BaseScreen):
    """The runs the agent knows; opens one, or takes one up again."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next run", show=False),
        Binding("up,k", "move(-1)", "previous run", show=False),
        Binding("enter", "open", "open"),
        Binding("s", "resume_run", "resume run"),
        Binding("r", "reload", "refresh", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.runs: tuple[m.RunSummary, ...] | None = None
        self.problem = ""
        self.cursor = 0

    def on_mount(self) -> None:
        self.action_reload()
        self.set_interval(RUNS_REFRESH_SECONDS, self.action_reload)

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.action_reload()

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        head = header.lines(owner.live, owner.clock, columns, owner.glyphs, rows=2, badge=owner.badge)[:1]
        title = rule(columns, owner.glyphs.horizontal, (0, f"{owner.glyphs.horizontal} runs ", "title"))
        return [*head, title, *runs_view.lines(
            self.runs, self.cursor, self.problem, owner.live, owner.clock, columns, rows - 2, owner.glyphs
        )]  # fmt: skip

    def action_reload(self) -> None:
        if self.is_current:
            self.run_worker(self._load(), group="runs", exclusive=True)

    async def _load(self) -> None:
        client = self.owner.client
        if client is None:
            return
        try:
            self.runs, self.problem = (await client.runs()).runs, ""
        except TrainctlError as error:
            self.problem = str(error)
        self.cursor = min(self.cursor, max(len(self.runs or ()) - 1, 0))
        self.paint()

    @property
    def chosen(self) -> m.RunSummary | None:
        return self.runs[self.cursor] if self.runs and self.cursor < len(self.runs) else None

    def action_move(self, by: int) -> None:
        self.cursor = min(max(self.cursor + by, 0), max(len(self.runs or ()) - 1, 0))
        self.paint()

    def action_open(self) -> None:
        if self.chosen is not None:
            self.run_worker(self.owner.open_run(self.chosen.run), group="open", exclusive=True)

    def action_resume_run(self) -> None:
        if self.chosen is not None:
            self.owner.open_dialog("start-run", {"resume": self.chosen.run})


class EventsScreen(BaseScreen):
    """Every event of the run, newest first, as the record has them; `/` keeps those with a text in them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "filter", "filter", key_display="/", priority=True),
        Binding("down,j", "scroll_lines(1)", "down", show=False),
        Binding("up,k", "scroll_lines(-1)", "up", show=False),
        Binding("pagedown", "scroll_pages(1)", "page down", show=False),
        Binding("pageup", "scroll_pages(-1)", "page up", show=False),
        Binding("home", "scroll_pages(-1000)", "newest", show=False),
        Binding("end", "scroll_pages(1000)", "oldest", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.older: tuple[m.Event, ...] = ()
        self.wanted = ""

    def compose(self) -> ComposeResult:
        yield Lines(self.owner.glyphs, id="body")
        yield Field(id="filter", placeholder="show events with...", compact=True)
        yield Bottom(self.owner.glyphs)

    def on_mount(self) -> None:
        self.first = 0
        self.query_one("#filter").display = False

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.run_worker(self._load(), group="events", exclusive=True)

    async def _load(self) -> None:
        client, run = self.owner.client, self.owner.shown.run
        if client is None or run is None:
            return
        try:
            self.older = (await client.events(run=run.run, limit=EVENTS_PAGE, newest=True)).events
        except TrainctlError as error:
            self.app.notify(str(error), severity="error", markup=False)
        self.paint()

    def found(self) -> list[m.Event]:
        """Events of the record and those that came since, once each, oldest first, after the filter."""
        state = self.owner.shown
        run = state.run.run if state.run else ""
        both = [*self.older, *state.run_events]
        known = {(event.run, event.id, event.at): event for event in both if event.run in ("", run)}
        kept = sorted(known.values(), key=lambda event: (event.at, event.id))
        wanted = self.wanted.lower()
        return [event for event in kept if wanted in f"{event.by} {event.kind} {event.verb or ''} {event.text}".lower()]

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        found = self.found()
        if self.query_one("#filter").display:
            rows -= 1
        room = max(rows - 2, 1)
        self.first = min(max(self.first, 0), max(len(found) - room, 0))
        shown = list(reversed(found))[self.first : self.first + room]
        head = header.lines(owner.shown, owner.clock, columns, owner.glyphs, rows=2, badge=owner.badge)[:1]
        what = f" with {self.wanted!r}" if self.wanted else ""
        part = f"{min(self.first + 1, len(found))}-{self.first + len(shown)} of {len(found)}"
        title = f"{owner.glyphs.horizontal} events{what}: {part} "
        made = [*head, rule(columns, owner.glyphs.horizontal, (0, title, "title"))]
        made += events_panel.all_lines(shown[::-1], owner.shown, owner.clock, columns, owner.glyphs)
        return (made + [fit((), columns)] * rows)[:rows]

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """`/` is text while something is typed."""
        return action != "filter" or not isinstance(self.focused, Input)

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        self.set_focus(box)

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            self.wanted, self.first = event.value, 0
            self.paint()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            event.input.display = bool(event.value)
            self.set_focus(None)
            self.paint()

    def key_escape(self) -> None:
        box = self.query_one("#filter", Input)
        box.value, box.display = "", False
        self.set_focus(None)
        self.paint()

    def action_scroll_lines(self, by: int) -> None:
        self.first += by
        self.paint()

    def action_scroll_pages(self, by: int) -> None:
        self.first += by * max(self.size.height - 4, 1)
        self.paint()


class HelpScreen(ModalScreen[None]):
    """The keys of the screen it was opened from, taken from its live bindings, and what the letters mean."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,question_mark", "close", "close")]

    def __init__(self, keys: list[tuple[str, str]], address: str) -> None:
        super().__init__()
        self._keys, self._address = keys, address

    def compose(self) -> ComposeResult:
        box = Vertical(id="help")
        box.border_title = "keys"
        with box, VerticalScroll():
            yield Lines(cast("TrainctlApp", self.app).glyphs, id="help-text", grow=True)

    def on_mount(self) -> None:
        self.set_class(cast("TrainctlApp", self.app).glyphs.ascii_only, "ascii")
        half = -(-len(self._keys) // 2)
        cells = [fit(line(Piece(f"{key:>7}  ", "key"), what), _HELP_CELLS) for key, what in self._keys]
        made: list[Line] = [(*left, *right) for left, right in zip_longest(cells[:half], cells[half:], fillvalue=())]
        made += [(), *_LEGEND, (), line(Piece("from a shell  ", "label"), "trainctl send VERB ... --connect ",
                                        Piece(self._address, "strong"))]  # fmt: skip
        self.query_one("#help-text", Lines).show(made)

    def action_close(self) -> None:
        self.dismiss()


_HELP_CELLS = 34
_LEGEND: tuple[Line, ...] = (
    line(
        Piece("   step  ", "label"), Piece("d", "phase_d"), " data  ", Piece("f", "phase_f"), " forward  ",
        Piece("b", "phase_b"), " backward  ", Piece("s", "phase_s"), " sync  ", Piece("o", "phase_o"), " optimizer  ",
        Piece(".", "phase_wait"), " wait",
    ),
    line(Piece("  micro  ", "label"), "8×3: micro-batch 8, three passes for the rank's share"),
    line(Piece("own t/s  ", "label"), "tokens / (data + forward + backward): the rank's speed alone"),
    line(Piece("   SLOW  ", "label"), "the others wait for it, for the phase in capitals"),
    line(Piece("   loss  ", "label"), "mean of the last 16 steps; the chart has each"),
    line(Piece("    eff  ", "label"), "fleet tokens/s over the sum of own rates"),
    line(Piece("    n/a  ", "label"), "not known; what is old is dimmed, its age beside it"),
    line(Piece("  1 2 3  ", "label"), "commands that took effect, on the charts and among the events"),
)  # fmt: skip
