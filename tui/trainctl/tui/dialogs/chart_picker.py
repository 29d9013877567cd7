"""The dialog that chooses what a chart shows: a list to tick, narrowed by typing."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from textual.binding import Binding, BindingType
from textual.widget import Widget
from textual.widgets import Input

from trainctl.protocol.messages import RunSummary, RunView, metric_of
from trainctl.tui.charts import metrics
from trainctl.tui.charts.viewport import ALL_RANKS, Chart, ChartView, Pick, with_chart
from trainctl.tui.dialogs.popup import Dialog
from trainctl.tui.text.formatting import count, loss
from trainctl.tui.text.run_lines import LAST_LOSS
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, fit, groups, key_words, line, shorten
from trainctl.tui.widgets.fields import InputField

MAX_RUNS = 4
_NAME_CELLS = 20


@dataclass(frozen=True)
class PickerEntry:
    """A line of the list: a metric to pick, or a run by its id."""

    what: Pick | str
    name: str
    detail: str

    def has(self, words: Sequence[str]) -> bool:
        text = f"{self.name} {self.detail} {'run' if isinstance(self.what, str) else ''}".lower()
        return all(word in text for word in words)


@dataclass(frozen=True)
class Picker:
    """The list, what it is narrowed to, and the line the cursor is on among those left."""

    choices: tuple[PickerEntry, ...]
    wanted: str = ""
    cursor: int = 0

    @property
    def left(self) -> list[PickerEntry]:
        """Return the choices with every word that was typed."""
        words = self.wanted.lower().split()
        return [choice for choice in self.choices if choice.has(words)]

    @property
    def chosen(self) -> PickerEntry | None:
        left = self.left
        return left[min(self.cursor, len(left) - 1)] if left else None


def choices_of(
    run: RunView | None, runs: Sequence[RunSummary], own: Iterable[str] = (), own_of_run: Iterable[str] = ()
) -> tuple[PickerEntry, ...]:
    """Return every metric, of each node where it is kept by rank, and every other run; `own` metrics are those that its
    ranks bring, `own_of_run` those that it has as a whole."""
    ranks = metrics.rank_names(run)
    made = [PickerEntry(Pick(name), metric_of(name).title, "the run") for name in own_of_run]
    for name in metrics.names(own):
        metric = metric_of(name)
        title, unit = metric.title, clean(run.unit_of(metric)) if run is not None else metric.unit
        if not metrics.per_rank(name):
            made.append(PickerEntry(Pick(name), title, unit))
            continue
        made.append(PickerEntry(Pick(name, ALL_RANKS), title, "every node"))
        if len(ranks) > 1:
            made += [PickerEntry(Pick(name, rank), title, where) for rank, where in ranks.items()]
    for item in runs:
        if run is None or item.run != run.run:
            words = f"{item.state} {item.step:,}/{count(item.steps)}, {LAST_LOSS.label} {loss(item.last_loss)}"
            made.append(PickerEntry(item.run, clean(item.run), words))
    return tuple(made)


def narrowed(picker: Picker, text: str) -> Picker:
    return replace(picker, wanted=text, cursor=0)


def moved_by(picker: Picker, by: int) -> Picker:
    return replace(picker, cursor=min(max(picker.cursor + by, 0), max(len(picker.left) - 1, 0)))


def toggled(view: ChartView, what: Pick | str) -> ChartView:
    """Return the view with a line more or fewer in the chart in focus, or a run more or fewer over all of them."""
    if isinstance(what, str):
        if what in view.runs:
            return replace(view, runs=tuple(run for run in view.runs if run != what))
        return replace(view, runs=(*view.runs, what)[-MAX_RUNS:])
    chart = view.chart
    picks = tuple(pick for pick in chart.picks if pick != what) if what in chart.picks else (*chart.picks, what)
    return with_chart(view, Chart(picks, chart.log, chart.smoothing))


def picker_lines(picker: Picker, view: ChartView, columns: int, rows: int) -> list[Line]:
    """Return exactly `rows` lines: the choices left around the cursor, each with whether it is drawn; a click toggles
    it."""
    left = picker.left
    cursor = min(picker.cursor, max(len(left) - 1, 0))
    start = min(max(cursor - rows // 2, 0), max(len(left) - rows, 0))
    shown = range(start, len(left))[:rows]
    lines = [_row(left[index], index, index == cursor, view, columns) for index in shown]
    if not left:
        lines = [line(Piece("no match", "dim"))]
    return filled(lines, columns, rows)


def _row(choice: PickerEntry, index: int, here: bool, view: ChartView, columns: int) -> Line:
    is_run = isinstance(choice.what, str)
    on = choice.what in view.runs if is_run else choice.what in view.chart.picks
    press = f"screen.turn({index})"
    lead = "▸" if here else " "
    name = f"run {choice.name}" if is_run else choice.name
    size = max(_NAME_CELLS, len(name) + 1) if is_run else _NAME_CELLS
    body = f"{lead} [{'x' if on else ' '}] {name.ljust(size)} {choice.detail}"
    role = "cursor" if here else "strong" if on else "text"
    return fit((Piece(shorten(body, columns).ljust(columns), role, press),), columns)


_MAX_ROWS = 24
_FRAME_ROWS = 6


class Narrow(InputField):
    """The field that narrows the list. A space ticks a line, but among words that are typed it is one."""

    def check_consume_key(self, key: str, character: str | None) -> bool:
        return (key != "space" or bool(self.value)) and super().check_consume_key(key, character)


class ChartPicker(Dialog[None]):
    """Ticks metrics of the chart in focus and runs for all charts; `toggle` does it at once and gives the new view."""

    DEFAULT_CSS = """
    ChartPicker { background: $background 40%; }
    ChartPicker #dialog { width: 68; }
    ChartPicker Lines { height: auto; }
    #narrow { width: 1fr; height: 1; background: $panel; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close", show=False, priority=True),
        Binding("down", "move(1)", "down", show=False, priority=True),
        Binding("up", "move(-1)", "up", show=False, priority=True),
        Binding("pagedown", "move(10)", "down", show=False, priority=True),
        Binding("pageup", "move(-10)", "up", show=False, priority=True),
        Binding("enter,space", "toggle_here", "show or hide", show=False, priority=True),
    ]

    CELLS = 62

    def __init__(self, picker: Picker, view: ChartView, title: str, toggle: Callable[[Pick | str], ChartView]) -> None:
        super().__init__(title)
        self.picker, self._view, self._toggle = picker, view, toggle

    def content(self) -> Iterable[Widget]:
        yield Narrow(id="narrow", placeholder="type to filter by metric, node or run", compact=True)
        yield from super().content()

    def on_mount(self) -> None:
        self.query_one("#narrow").focus()

    def text(self) -> list[Line]:
        rows = max(min(len(self.picker.choices), _MAX_ROWS, self.size.height - _FRAME_ROWS), 1)
        hints = (("enter", "or click shows or hides it"), ("up down", "choose"), ("esc", "done"))
        keys = [key_words(key, words) for key, words in hints]
        listed = picker_lines(self.picker, self._view, self.cells, rows)
        return [*listed, (), groups(keys, self.cells)]

    @property
    def _typed(self) -> str:
        return self.query_one("#narrow", Input).value

    def _narrow(self) -> None:
        """Narrow the list by what is typed: keys of one burst come before the field's message of the letters among
        them."""
        if self._typed != self.picker.wanted:
            self.picker = narrowed(self.picker, self._typed)

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        self._narrow()
        self.refresh_text()

    def action_move(self, by: int) -> None:
        self._narrow()
        self.picker = moved_by(self.picker, by)
        self.refresh_text()

    def action_toggle_here(self) -> None:
        self._narrow()
        chosen = self.picker.chosen
        if chosen is not None:
            self._view = self._toggle(chosen.what)
            self.refresh_text()

    def action_turn(self, index: int) -> None:
        """Toggle a line that was clicked; what is typed goes on narrowing."""
        self.query_one("#narrow").focus()
        self.picker = moved_by(self.picker, index - self.picker.cursor)
        self.action_toggle_here()
