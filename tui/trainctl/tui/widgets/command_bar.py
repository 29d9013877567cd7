"""The bottom of every screen: what the keys do, or the `:` line with what it would do and how its command fares."""

from functools import partial

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.suggester import Suggester
from textual.widgets import Input

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.tui.commands import arguments, forms
from trainctl.tui.commands.context import READ_ONLY, AppContext, KeyHint, context_of, foresee
from trainctl.tui.commands.forms import preview
from trainctl.tui.text.styled_line import Line, Piece, fit, folded, groups, key_words, line, spread, width
from trainctl.tui.widgets.fields import InputField
from trainctl.tui.widgets.line_view import Lines

_LAST = ("command_line", "filter", "search", "help", "detach")
"""Actions that stay at the right end whatever else fits."""
_MOST_SAID = 4
"""Rows of what is said about a command."""


def keys_line(keys: list[KeyHint], columns: int) -> Line:
    """Return the keys as one line: what fits of the first ones, and always `:`, `/`, `?` and `q`; where not all fit,
    the screens share one word. A click presses the key."""
    parts = {hint.action: _key(hint, hint.words) for hint in keys}
    right = groups([parts[name] for name in _LAST if name in parts], columns, gap=" ")
    room = columns - width(right) - 1
    if sum(width(part) + 1 for name, part in parts.items() if name not in _LAST) > room + 1:
        screens = [hint for hint in keys if hint.display.isdigit()]
        short = line(*(piece for hint in screens for piece in _key(hint, "")), Piece(" view", "label"))
        others = {hint.action: parts[hint.action] for hint in keys if hint not in screens}
        parts = {"screens": short if screens else (), **others}
    left = groups([part for name, part in parts.items() if name not in _LAST], room, gap=" ")
    return spread(left, right, columns)


def _key(hint: KeyHint, words: str) -> Line:
    return key_words(hint.display, words, f"app.press({hint.key!r})")


class CommandBar(Vertical):
    """One line of keys, or of what the last command did; while one is typed or awaited its line, under what there is to
    say about it."""

    DEFAULT_CSS = "CommandBar { height: auto; dock: bottom; } CommandBar Lines { height: 1; }"

    def __init__(self) -> None:
        super().__init__()
        self.progress: forms.Progress | None = None
        self._said = 1  # rows, above the line that is typed
        self._bottom: tuple[list[KeyHint], Line, int] | None = None  # what the keys were last made from

    @property
    def _owner(self) -> AppContext:
        return context_of(self)

    @property
    def open(self) -> bool:
        """Return whether the `:` line is there."""
        return bool(self.query_one("#command", Input).display)

    @property
    def rows(self) -> int:
        return self._said + 1 if self.open else 1

    def compose(self) -> ComposeResult:
        yield Lines(id="keys", grow=True)
        yield InputField(
            id="command", placeholder="verb key=value ... [--node NAME]", compact=True, suggester=_Completion()
        )

    def on_mount(self) -> None:
        self.query_one("#command").display = False

    def paint(self) -> None:
        """Show the keys of the moment; while the `:` line is open, what it says stays."""
        if not self.open:
            owner, columns = self._owner, self.size.width
            bottom = owner.key_hints(), owner.outcome, columns
            if bottom != self._bottom:
                self._bottom = bottom
                hints, outcome, _ = bottom
                self.query_one("#keys", Lines).show([fit(outcome, columns) if outcome else keys_line(hints, columns)])

    def start(self) -> None:
        """Open the `:` line."""
        box = self.query_one("#command", Input)
        box.display, box.value, self.progress = True, "", None
        self.screen.set_focus(box)
        self._invite()

    def _invite(self) -> None:
        self._say(line(Piece("type a verb as on the command line; enter sends, esc closes", "dim")))

    def close(self) -> None:
        self.query_one("#command").display = False
        self.screen.set_focus(None)
        self._repaint()

    def _repaint(self) -> None:
        paint = getattr(self.screen, "paint", None)
        if paint is not None:
            paint()

    def _say(self, pieces: Line) -> None:
        columns, self._bottom = self.size.width, None
        rows = [fit(row, columns) for row in folded(pieces, columns, _MOST_SAID)]
        self.query_one("#keys", Lines).show(rows)
        if len(rows) != self._said:
            self._said = len(rows)
            self._repaint()

    def on_input_changed(self, event: Input.Changed) -> None:
        event.stop()
        if self.open and event.input.value.startswith(":"):
            self._begin_again(event.input)
        if not self.open or not event.value.strip() or event.value.startswith(":"):
            return
        self.progress = None
        self._say(self._judge(event.value))

    def _begin_again(self, box: Input) -> None:
        """Begin a new command: `:` was typed into the line that is open, as after a command that has ended."""
        text = box.value.lstrip(":")
        box.value, box.cursor_position, self.progress = text, len(text), None
        if not text:
            self._invite()

    def _judge(self, text: str) -> Line:
        word, complete = text.split()[0].lower(), " " in text.lstrip()
        begun = [verb for name, verb in verbs.VERBS.items() if name.startswith(word)]
        if begun and word not in verbs.VERBS and not complete:
            return line(Piece("; ".join(arguments.signature(verb) for verb in begun), "dim"))
        try:
            order = arguments.parse(text)
        except InvalidInputError as error:
            return line(Piece(str(error), "dim" if begun and not complete else "bad"))
        said = preview(order, self._owner.shown)
        if said.role != "bad":
            foresee(self._owner, order, partial(self._foreseen, text))
        return line(said)

    def _foreseen(self, text: str, forecast: Piece) -> None:
        """Show what the run's lead says about the command, if it still stands in the line."""
        if self.open and self.progress is None and self.query_one("#command", Input).value == text:
            self._say(line(forecast))

    def on_input_submitted(self, event: Input.Submitted) -> None:
        event.stop()
        text = event.value.lstrip(":")
        if not text.strip():
            self.close()
            return
        try:
            order = arguments.parse(text)
        except InvalidInputError as error:
            self._say(line(Piece(str(error), "bad")))
            return
        if self._owner.read_only:
            self._say(line(Piece(READ_ONLY, "warning")))
            return
        event.input.value = ""
        self._owner.send_order(order, self)

    def key_escape(self, event: events.Key) -> None:
        if self.open:
            event.stop()
            self.close()

    @property
    def watching(self) -> bool:
        return self.is_mounted and self.open

    def follow(self, progress: forms.Progress) -> None:
        """Show how far the command has come, in place of the hints; one that was applied closes an empty line."""
        self.progress = progress
        if self.watching and progress.applied and not self.query_one("#command", Input).value:
            self.close()
        elif self.watching:
            self._say(line(Piece(f"{progress.order.verb}  ", "strong"), *forms.progress_line(progress)))


class _Completion(Suggester):
    """Proposes the verb, and then the words that it takes."""

    def __init__(self) -> None:
        super().__init__(use_cache=False, case_sensitive=True)

    async def get_suggestion(self, value: str) -> str | None:
        return arguments.completed(value)
