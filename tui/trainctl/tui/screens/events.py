"""Every event of a run: who did what, when, at which step, and what it did."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.widgets import Input

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.tui import events_panel, header
from trainctl.tui.bottom import Bottom
from trainctl.tui.lines import Line, fit, rule
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.widgets import Field, Lines

EVENTS_PAGE = 500


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
