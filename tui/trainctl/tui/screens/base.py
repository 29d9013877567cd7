"""The screens' base: a body of lines over the bottom line; what screens of a run's rank share; and the screens by name,
each loaded when it is first shown."""

import abc
import importlib
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widget import Widget

from trainctl.tui.commands.context import AppContext, KeyHint, Values, context_of
from trainctl.tui.screens import header
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.run_lines import LAST_LOSS
from trainctl.tui.text.styled_line import Line, line
from trainctl.tui.widgets.command_bar import CommandBar
from trainctl.tui.widgets.line_view import Lines, Repaintable

LEAST_COLUMNS, LEAST_ROWS = 60, 15
RESERVED_KEYS = {"ctrl+c": "always quits", "escape": "always closes what is open"}
_BY_ARGUMENT = re.compile(r"(?:show|dialog)\('([a-z0-9-]+)'\)")


def name_of(binding: Binding) -> str:
    """Return `events` of show('events'), `set-lr` of dialog('set-lr'), `filter` of filter, and of choose(1) its
    words."""
    match = _BY_ARGUMENT.fullmatch(binding.action)
    if match:
        return match[1]
    text = binding.description if "(" in binding.action else binding.action.removeprefix("app.")
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def named(bindings: Iterable[BindingType], where: str = "") -> list[BindingType]:
    """Return the bindings with their names as ids, by which Textual lays another key over them, those of a screen after
    its name (`events-filter`); reserved keys stay fixed."""
    before = f"{where}-" if where else ""
    return [
        replace(binding, id=before + name_of(binding))
        if isinstance(binding, Binding) and binding.id is None and binding.key not in RESERVED_KEYS
        else binding
        for binding in bindings
    ]


def too_small(columns: int, rows: int) -> str | None:
    """Return what to say instead of a screen that can't be read, or None."""
    if columns >= LEAST_COLUMNS and rows >= LEAST_ROWS:
        return None
    return f"needs {LEAST_COLUMNS}x{LEAST_ROWS}: {columns}x{rows} is too small"


class StatusBar(Lines):
    """A line of a program's own between the body and the bottom line."""

    DEFAULT_CSS = "StatusBar { height: 1; }"

    def paint(self) -> None:
        """Show the present state."""


class BaseScreen(Screen[Any], Repaintable):
    """A body of lines over the bottom line; `paint` brings both up to date."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "overview", show=False, tooltip="back to the Overview, step by step")
    ]
    AUTO_FOCUS = ""
    BODY: ClassVar[type[Lines]] = Lines
    NEEDED: tuple[str, ...] = ("#body", "#keys")
    """Widgets that have to be there for it to be painted."""
    paints = 0
    """Number of times that it was painted."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Give its keys names, by which the configuration knows them."""
        cls.BINDINGS = named(cls.__dict__.get("BINDINGS", []), cls.__name__.removesuffix("Screen").lower())
        super().__init_subclass__(**options)

    @property
    def owner(self) -> AppContext:
        return context_of(self)

    @property
    def own_keys(self) -> frozenset[str]:
        """Return dialogs whose keys mean something else here."""
        return frozenset()

    def compose(self) -> ComposeResult:
        yield self.BODY(id="body")
        yield from self.between()
        yield from self.owner.above_bottom()
        yield CommandBar()

    def action_back(self) -> None:
        """Undo what narrows the view, or leave the screen."""
        self.owner.action_show("overview")

    def between(self) -> Iterable[Widget]:
        """Return what a screen has between its body and the bottom line."""
        return ()

    def on_resize(self) -> None:
        self.paint()

    def on_screen_resume(self) -> None:
        self.paint()

    @property
    def is_whole(self) -> bool:
        """Return whether all of it is there: a tick can come while it is made or taken down, which is done child by
        child."""
        return all(self.query_one_optional(needed) for needed in self.NEEDED)

    def paint(self) -> None:
        """Draw the present state; below the least size one line says so."""
        columns, rows = self.size
        if not self.is_whole:
            return
        self.paints += 1
        body = self.query_one("#body", Lines)
        small = too_small(columns, rows)
        bottom = self.query_one(CommandBar)
        bottom.display = small is None
        if small is not None:
            body.show([line(small)])
        elif rows and columns:
            body.show(self.lines(columns, self._body_rows()))
            for bar in self.query(StatusBar):
                bar.paint()
            bottom.paint()

    def _body_rows(self) -> int:
        return self.size.height - self.query_one(CommandBar).rows - self.rows_between() - len(self.query(StatusBar))

    def rows_between(self) -> int:
        """Return rows that those between take."""
        return 0

    def head(self, columns: int, state: ViewState | None = None) -> Line:
        """Return the first line: of the run shown, or of another state."""
        owner = self.owner
        return header.lines(state or owner.shown, owner.clock, columns, rows=2, badge=owner.badge)[0]

    def values(self) -> Values:
        """Return what `y` copies: the likeliest first."""
        state = self.owner.shown
        if state.run is None:
            return ()
        loss = state.last_step.value.loss if state.last_step is not None else None
        last = ((LAST_LOSS.label, f"{loss:.6g}"),) if loss is not None and math.isfinite(loss) else ()
        run = state.run
        return (("run", run.run), ("directory", run.directory), ("step", str(run.step)), *last)

    def arranged(self, hints: list[KeyHint]) -> list[KeyHint]:
        """Return the keys for the bottom line, in their order there."""
        return hints

    def arrived(self) -> None:
        """Take note of a new snapshot of the live run."""

    def undo(self) -> None:
        """Offer the newest changes that can be undone."""
        from trainctl.tui.dialogs import undo_picker

        undo_picker.offer_undo(self.owner)

    @abc.abstractmethod
    def lines(self, columns: int, rows: int) -> list[Line]:
        """Return the body: exactly `rows` lines of `columns` cells."""


KINDS: Final = {
    "overview": "OverviewScreen",
    "runs": "RunsScreen",
    "charts": "ChartsScreen",
    "events": "EventsScreen",
    "alerts": "AlertsScreen",
    "node": "NodeScreen",
    "logs": "LogsScreen",
    "samples": "SamplesScreen",
    "policies": "PoliciesScreen",
    "calibration": "CalibrationScreen",
    "diagnosis": "DiagnosisScreen",
    "step_profile": "StepProfileScreen",
}
"""Classes of the screens by name, in the module of that name."""


def _kind(name: str) -> Any:
    return getattr(importlib.import_module(f"trainctl.tui.screens.{name}"), KINDS[name])


def _made(name: str) -> Any:
    return _kind(name)(name=name)


def makers() -> dict[str, Callable[[], Screen[Any]]]:
    """Return what makes each screen."""
    return {name: partial(_made, name) for name in KINDS}


def load_all() -> None:
    """Load every screen, for what asks all of them for their bindings."""
    for name in KINDS:
        _kind(name)
