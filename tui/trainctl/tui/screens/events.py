"""Every event of a run: who did what, when, at which step, how it ended, and what it did to the speed."""

from collections.abc import Sequence
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import Event, EventsRequest
from trainctl.tui.charts.marks import numbered
from trainctl.tui.commands import undo
from trainctl.tui.commands.context import KeyHint, Values
from trainctl.tui.commands.verb_description import NoInverse
from trainctl.tui.dialogs import undo_picker
from trainctl.tui.screens import events_table
from trainctl.tui.screens.table_screen import RowsScreen
from trainctl.tui.state import effects, run_events
from trainctl.tui.state.table_schemas import EVENTS, EventRow
from trainctl.tui.text.styled_line import Line, Piece, filled, fit, line, rule

EVENTS_PAGE = 500
_MOST_ASKED = 12
"""Old events whose effect is asked of the record in one go."""
_FIRST = ("details", "undo")
"""Keys that come first at the bottom."""


class EventsScreen(RowsScreen[EventRow]):
    """Every event of the run, newest first, as the record has them; one is always chosen."""

    TABLE = EVENTS
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next event", show=False),
        Binding("up,k", "move(-1)", "previous event", show=False),
        Binding("pagedown", "move_pages(1)", "page down", show=False),
        Binding("pageup", "move_pages(-1)", "page up", show=False),
        Binding("home", "move_pages(-1000)", "newest", show=False),
        Binding("end", "move_pages(1000)", "oldest", show=False),
        Binding("enter", "details", "details", tooltip="show the chosen event in full"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.older: tuple[Event, ...] = ()
        self.first = 0
        self.undoable = False  # the chosen event, as last drawn
        self._measured: dict[tuple[str, int], effects.Effect] = {}  # by run and event id

    def on_screen_resume(self) -> None:
        super().on_screen_resume()
        self.run_worker(self._load(), group="events", exclusive=True)

    async def _load(self) -> None:
        client, run = self.owner.client, self.owner.shown.run
        if client is None or run is None:
            return
        try:
            self.older = (await client.lead.ask(EventsRequest, run=run.run, limit=EVENTS_PAGE, newest=True)).events
        except TrainctlError as error:
            self.app.notify(str(error), severity="error", markup=False)
        self.paint()
        await self._measure_old()

    async def _measure_old(self) -> None:
        client, run = self.owner.client, self.owner.shown.run
        rates, events = self.owner.shown.lately("tokens_per_second"), self.events()
        old = [
            event
            for event in reversed(events)
            if run_events.changes_speed(event)
            and event.step is not None
            and not effects.covered(rates, event.step)
            and (event.run, event.id) not in self._measured
        ]
        for event in old[:_MOST_ASKED]:
            if client is None or run is None:
                return
            try:
                found = await effects.in_record(client.lead, run.run, events, event)
            except TrainctlError:
                return  # the events stand without it
            if found is not None:
                self._measured[event.run, event.id] = found
        self.paint()

    # ------------------------------------------------------------ what there is

    def events(self) -> list[Event]:
        """Return events of the record and those that came since, once each, oldest first."""
        state = self.owner.shown
        run = state.run.run if state.run else ""
        both = [*self.older, *state.run_events]
        known = {(event.run, event.id, event.at): event for event in both if event.run in ("", run)}
        return sorted(known.values(), key=lambda event: (event.at, event.id))

    def effect(self, event: Event, events: Sequence[Event]) -> effects.Effect | None:
        """Return the effect as measured in the live windows, or else from the record; once all its steps are there it
        is kept."""
        key = (event.run, event.id)
        if not run_events.changes_speed(event) or key in self._measured:
            return self._measured.get(key)
        rates = self.owner.shown.lately("tokens_per_second")
        found = effects.measured(rates, events, event)
        last = (event.step or 0) + effects.EFFECT_STEPS
        if found is not None and effects.covered(rates, event.step or 0) and rates.newest_step >= last:
            self._measured[key] = found
        return found

    def _arrange(self) -> None:
        events = self.events()
        run = self.owner.shown.run
        nodes = tuple(dict.fromkeys(view.node for view in run.ranks)) if run else ()
        found = {event.id: self.effect(event, events) for event in events if run_events.changes_speed(event)}
        shares = {id: effect.change for id, effect in found.items() if effect is not None}
        self.arrange_rows(events_table.rows_of(events, self.owner.clock, nodes, shares)[::-1])

    def row_key(self, row: EventRow) -> int:
        return row.event.id

    @property
    def chosen(self) -> Event | None:
        return self.rows[self.cursor].event if self.rows else None

    # ------------------------------------------------------------ drawing

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner = self.owner
        self._arrange()
        room = max(rows - 3, 1)
        self.first = min(max(self.first, self.cursor - room + 1), self.cursor, max(len(self.rows) - room, 0))
        shown = range(self.first, min(self.first + room, len(self.rows)))
        part = f"{min(self.first + 1, len(self.rows))}-{shown.stop} of {len(self.rows)}" if self.rows else "none"
        title = (0, f"─ events: {part} ", "title")
        events = self.events()
        context = events_table.Context(owner.clock, numbered(owner.shown), undo.undid(events))
        drawn = [self.head(columns), rule(columns, title)]
        drawn.append(events_table.head(columns, self.rows, self.order, context))
        table = events_table.lines(self.rows, shown, self.cursor, columns, context)
        self.undoable = self.chosen is not None and isinstance(self.undoing(self.chosen), undo.Inverse)
        if self.undoable and (key := owner.key_of("undo")):
            at = self.cursor - self.first
            table[at] = events_table.with_key(table[at], f"{key} undo", "app.undo")
        drawn += table
        if not self.rows:
            words = "the filter hides all events; esc clears it" if self.hidden else "nothing has happened yet"
            drawn.append(fit(line(Piece(words, "dim")), columns))
        return filled(drawn, columns, rows)

    def sort_fields(self) -> Sequence[str]:
        return events_table.SORTED_BY

    # ------------------------------------------------------------ actions

    def arranged(self, hints: list[KeyHint]) -> list[KeyHint]:
        """Return its own keys first; undo among them while the chosen event can be undone, else not at all."""
        found = [hint for hint in hints if hint.action != "undo" or self.undoable]
        return sorted(found, key=lambda hint: _FIRST.index(hint.action) if hint.action in _FIRST else len(_FIRST))

    def action_move_pages(self, by: int) -> None:
        self.action_move(by * max(self.size.height - 5, 1))

    def on_mouse_scroll_down(self) -> None:
        self.action_move(3)

    def on_mouse_scroll_up(self) -> None:
        self.action_move(-3)

    def undoing(self, event: Event) -> undo.Inverse | str:
        """Return what undoes the event now, or why nothing does."""
        try:
            return undo.of(event, self.owner.shown.run, self.events())
        except NoInverse as reason:
            return str(reason)

    def action_details(self) -> None:
        event = self.chosen
        if event is None:
            return
        owner = self.owner

        def made(columns: int) -> list[Line]:
            events = self.events()
            undid, found = undo.undid(events).get(event.id), self.effect(event, events)
            return undo_picker.lines(event, found, self.undoing(event), owner.clock, columns, undid)

        self.app.push_screen(undo_picker.EventDetails(made), self._after_details)

    def _after_details(self, wish: str | None) -> None:
        if wish == "undo":
            self.undo()
        elif wish == "copy":
            undo_picker.copy_value(self.owner, self.values())

    def undo(self) -> None:
        """Open the dialog of what undoes the chosen event, or says why nothing does."""
        found = self.undoing(self.chosen) if self.chosen is not None else None
        if isinstance(found, str):
            self.app.notify(f"can't undo: {found}", severity="warning", markup=False)
        elif found is not None:
            undo_picker.open_undo(self.owner, found)

    def values(self) -> Values:
        event = self.chosen
        if event is None:
            return ()
        at = self.owner.clock.time_of(event.at)
        texts = (
            ("step", str(event.step) if event.step is not None else ""),
            ("before", event.before),
            ("after", event.after),
            ("command id", event.command),
        )
        line_of = f"{at} {event.by} {run_events.event_words(event)}"
        return (("line", line_of), ("text", event.text), *((name, text) for name, text in texts if text))
