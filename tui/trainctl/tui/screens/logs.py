"""The logs of all trainers of a run, and what each screen with a log shares: reading, searching and moving."""

import abc
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input
from textual.worker import Worker

from trainctl.tui.screens import log_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.screens.log_view import Named, View, held, jumped, names_of, problems, scrolled
from trainctl.tui.state.filter_language import TypedLineError, parse
from trainctl.tui.state.merged_log import LogEntry
from trainctl.tui.state.table_schemas import LOGS
from trainctl.tui.text.styled_line import Line, rule, shorten
from trainctl.tui.widgets.fields import InputField

WHEEL_LINES = 3


class LogScreen(BaseScreen):
    """`names` says whose logs; `log_lines` draws them, and remembers on how many rows for the keys that move."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding(
            "slash",
            "search",
            "search",
            key_display="/",
            tooltip="search the logs, as tables are filtered",
            priority=True,
        ),
        Binding("n", "jump(False)", "next", tooltip="next match"),
        Binding("N", "jump(True)", "previous", tooltip="previous match", show=False),
        Binding("m", "matches", "matches", tooltip="only matching lines, or all"),
        Binding("F", "hold", "follow", tooltip="follow the end of the log, or pause"),
        Binding("down,j", "scroll_log(1)", "down", show=False),
        Binding("up,k", "scroll_log(-1)", "up", show=False),
        Binding("pagedown", "page_log(1)", "page down", show=False),
        Binding("pageup", "page_log(-1)", "page up", show=False),
        Binding("home", "ends(True)", "oldest", show=False),
        Binding("end", "ends(False)", "newest line, and follow", show=False),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self.view = View()
        self._rows = 1
        self._kept: tuple[tuple[object, ...], Sequence[LogEntry], int] = ((), (), 0)
        self._reading: tuple[str, Mapping[int, str]] | None = None

    def between(self) -> Iterable[Widget]:
        yield InputField(
            id="filter", placeholder=f"a word, ~pattern or field:value; fields: {LOGS.names}", compact=True
        )

    def on_mount(self) -> None:
        self.query_one("#filter").display = False

    @abc.abstractmethod
    def names(self) -> dict[int, Named]:
        """Return the ranks whose logs are shown, and what they are called."""

    # ------------------------------------------------------------ reading

    def on_screen_suspend(self) -> None:
        self._reading = None
        self.workers.cancel_group(self, "logs")

    def paint(self) -> None:
        if self.is_current:
            self._read()
        super().paint()

    def _read(self) -> None:
        """Read what is to be shown, from where it was left; from the start only when that is something else."""
        run = self.owner.shown.run
        wanted = (run.run if run else "", {rank: item.node for rank, item in self.names().items()})
        if wanted != self._reading:
            self._reading = wanted
            # The function, not its coroutine: what is wanted next may end this before it has begun.
            read = partial(self.owner.logs.keep_up, *wanted)
            _: Worker[None] = self.run_worker(read, group="logs", exclusive=True)

    # ------------------------------------------------------------ drawing

    def rows_between(self) -> int:
        return 1 if self.query_one("#filter").display else 0

    def entries(self) -> Sequence[LogEntry]:
        """Return the lines that are shown, of which `found` have a match."""
        tail, names = self.owner.logs.tail, self.names()
        key = (tail.entries, self.view.query, self.view.only, tuple(names))
        if not self._kept[0] or key[0] is not self._kept[0][0] or key[1:] != self._kept[0][1:]:
            mine = [entry for entry in tail.entries if entry.rank in names]
            kept = self.view.query.kept(mine)
            self._kept = (key, kept if self.view.only else mine, len(kept))
        return self._kept[1]

    def log_lines(self, columns: int, rows: int) -> list[Line]:
        """Return the log under a rule of its own, in exactly `rows` lines."""
        owner, names = self.owner, self.names()
        tail, entries = owner.logs.tail, self.entries()
        self._rows = max(rows - 1, 1)
        title = f"─ {log_view.title(tail, self.view, entries, self._kept[2], names)} "
        wrong = self.view.problem or problems(tail, names)
        labels = [(0, title, "title")]
        if wrong:
            text = f" {shorten(wrong, max(columns - len(title) - 6, 12))} "
            labels.append((columns - len(text) - 1, text, "warning"))
        return [
            rule(columns, *labels),
            *log_view.lines(tail, self.view, entries, names, owner.clock, columns=columns, rows=rows - 1),
        ][:rows]

    # ------------------------------------------------------------ searching

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Return what is typed is text; without a search there is nothing to jump to."""
        if isinstance(self.focused, Input):
            return action not in ("search", "jump", "matches", "hold")
        return action not in ("jump", "matches") or bool(self.view.query.text)

    @property
    def own_keys(self) -> frozenset[str]:
        return frozenset({"note"}) if bool(self.view.query.text) else frozenset()

    def action_search(self) -> None:
        box = self.query_one("#filter", Input)
        box.display = True
        self.set_focus(box)
        self.paint()

    def on_input_changed(self, event: Input.Changed) -> None:
        if event.input.id == "filter":
            try:
                self.view = replace(self.view, query=parse(event.value, LOGS), problem="", at=None)
            except TypedLineError as error:
                self.view = replace(self.view, problem=str(error))
            self.action_jump(True)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        if event.input.id == "filter":
            event.input.display = False
            self.set_focus(None)
            self.paint()

    def action_back(self) -> None:
        if not (self.view.query.text or self.rows_between()):
            super().action_back()
            return
        box = self.query_one("#filter", Input)
        box.value, box.display = "", False
        self.set_focus(None)
        self.view = View(top=self.view.top)
        self.paint()

    def action_jump(self, back: bool) -> None:
        self.view = jumped(self.view, self.entries(), self._rows, back=back)
        self.paint()

    def action_matches(self) -> None:
        self.view = replace(self.view, only=not self.view.only)
        self.paint()

    # ------------------------------------------------------------ moving

    def action_hold(self) -> None:
        self.view = held(self.view, self.entries(), self._rows)
        self.paint()

    def action_scroll_log(self, by: int) -> None:
        self.view = scrolled(self.view, self.entries(), self._rows, by)
        self.paint()

    def action_page_log(self, by: int) -> None:
        self.action_scroll_log(by * max(self._rows - 1, 1))

    def action_ends(self, oldest: bool) -> None:
        entries = self.entries()
        self.action_scroll_log(-len(entries) if oldest else len(entries))

    def on_mouse_scroll_down(self) -> None:
        self.action_scroll_log(WHEEL_LINES)

    def on_mouse_scroll_up(self) -> None:
        self.action_scroll_log(-WHEEL_LINES)


SHIFT_CELLS = 20


class LogsScreen(LogScreen):
    """The logs of all nodes, newest line last."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("right", "shift(1)", "right", show=False),
        Binding("left", "shift(-1)", "left", show=False),
    ]

    def names(self) -> dict[int, Named]:
        return names_of(self.owner.shown)

    def lines(self, columns: int, rows: int) -> list[Line]:
        return [self.head(columns), *self.log_lines(columns, rows - 1)]

    def action_shift(self, by: int) -> None:
        """Move along lines that are longer than the screen."""
        self.view = replace(self.view, shift=max(self.view.shift + by * SHIFT_CELLS, 0))
        self.paint()
