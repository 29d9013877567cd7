"""The dialogs of commands: each made from a Form, says what changes, checks as you type, and follows through."""

import abc
import shlex
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from textual import events
from textual.binding import Binding, BindingType
from textual.containers import Horizontal
from textual.widget import Widget
from textual.widgets import Input, Label

from trainctl.protocol.config.objectives import sample_unit
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import verbs
from trainctl.tui.commands import arguments, forms
from trainctl.tui.commands.checked_run_file import check_run_file
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.context import READ_ONLY, KeyHint, foresee
from trainctl.tui.commands.forms import changes_nothing, preview
from trainctl.tui.commands.targets import is_local
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.dialogs.popup import CLOSE, CLOSES, SEND, Dialog
from trainctl.tui.state.view_state import Clock
from trainctl.tui.text.styled_line import Line, Piece, clean, folded, key_words, labelled, line, plain, wrap
from trainctl.tui.widgets.fields import Choice, InputField

_LAST_ROWS = 3
"""Rows that say what its keys do, or why none does."""


class OrderDialog(Dialog[None]):
    """Sends one command. Closed before it is applied, the command goes on."""

    def __init__(self, form: forms.Form) -> None:
        super().__init__(form.title)
        self.form = form

    @property
    def blocked(self) -> str:
        """Return why nothing can be sent; empty if it can."""
        return READ_ONLY if self.owner.read_only else self.form.blocked

    def text(self) -> list[Line]:
        return self.asking() if self.progress is None else self.telling(self.progress)

    @abc.abstractmethod
    def asking(self) -> list[Line]:
        """Return the lines before a command is sent."""

    @abc.abstractmethod
    def telling(self, progress: forms.Progress) -> list[Line]:
        """Return the lines once it is sent."""


class CommandDialog(OrderDialog):
    """Asks for a verb's arguments."""

    DEFAULT_CSS = "CommandDialog #dialog { width: 68; }"

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "send"),
        Binding("y", "yes", "yes", show=False),
        Binding("n", "no", "no", show=False),
    ]

    CELLS = 60

    def __init__(self, form: forms.Form) -> None:
        super().__init__(form)
        self.order: Order | None = None
        self.idle = False  # the command would change nothing
        self._asked: Order | None = None  # the command that the run's lead was last asked about
        self._finding = Piece("")
        self._node = next((item.value for item in form.fields if item.name == "node"), None)

    def content(self) -> Iterable[Widget]:
        for item in self.form.fields:
            name = f"field-{item.name}"
            field = (
                Choice(item.choices, item.value, id=name)
                if item.choices
                else InputField(item.value, placeholder=item.if_empty, id=name, compact=True, select_on_focus=True)
            )
            yield Horizontal(Label(item.label, classes="name"), field, classes="field")
        yield from super().content()

    def on_mount(self) -> None:
        if not self._is_there:  # closed by a key of the same burst
            return
        typed = [item for item in self.form.fields if not item.choices]
        first = (typed or list(self.form.fields))[:1]
        if first:
            self.set_focus(self.query_one(f"#field-{first[0].name}"))
        self._judge()

    def on_key(self, event: events.Key) -> None:
        """Hand keys that came before the field had the focus, and enter on a choice, to the field, in order."""
        typed = next((box for box in self.query(Input) if not box.disabled), None)
        if typed is None or self.focused is typed or isinstance(self.focused, Input):
            return
        if event.key == "enter" or (event.is_printable and not isinstance(self.focused, Choice)):
            event.stop()
            typed.post_message(event)

    def on_resize(self) -> None:
        self._judge()

    def on_input_changed(self) -> None:
        self._judge()

    def on_choice_changed(self) -> None:
        self._follow_node()
        self._judge()

    def on_input_submitted(self) -> None:
        self.action_send()

    def values(self) -> dict[str, str]:
        """Return what the fields hold."""
        made = {}
        for item in self.form.fields:
            widget = self.query_one(f"#field-{item.name}")
            made[item.name] = widget.value if isinstance(widget, Input | Choice) else ""
        return made

    def _follow_node(self) -> None:
        """Start what is typed from the values of another node that was chosen."""
        node, run = self.values().get("node"), self.owner.shown.run
        view = next((item for item in run.ranks if item.node == node), None) if run else None
        if view is None or node == self._node:
            return
        self._node = node
        for field in DESCRIPTIONS[self.form.verb].fields_for(self.owner.shown, view.rank):
            if not field.choices:
                self.query_one(f"#field-{field.name}", Input).value = field.value

    def _judge(self) -> None:
        """Check the form of what is typed, and ask the lead what it would do."""
        if self.progress is not None or not self._is_there:
            return
        self.order, self.idle = None, False
        try:
            self.order = self.made_order()
        except InvalidInputError as error:
            self._asked = None
            self._say(Piece("" if self._is_untouched or self.form.blocked else str(error), "bad"))
            return
        self.idle = not self.blocked and changes_nothing(self.order, self.owner.shown)
        if self.idle:
            self._asked = None
            self._say(Piece("no change: already set", "label"))
        elif self.order != self._asked:
            self._asked, said = self.order, self.finding(self.order)
            self._say(said)
            if not self.blocked and said.role != "bad":
                foresee(self.owner, self.order, partial(self._foreseen, self.order))

    def _foreseen(self, order: Order, forecast: Piece) -> None:
        """Show what the run's lead says about the command, if it is still the one that the fields mean."""
        if self.progress is None and self._is_there and order == self.order:
            self._say(forecast)

    @property
    def _is_untouched(self) -> bool:
        """Return whether a field still waits for its first character and none was changed."""
        values = self.values()
        return any(not item.value for item in self.form.fields) and all(
            values[item.name] == item.value for item in self.form.fields
        )

    def hints(self) -> list[KeyHint]:
        """Return what its keys do now, for the bottom line."""
        if self.progress is not None or self.blocked or (self.idle and not self.form.ask):
            return [CLOSE]
        if self.form.ask:
            return [KeyHint("y", "yes", "screen.yes", "y"), KeyHint("n", "no", "screen.no", "n"), CLOSE]
        return [SEND, CLOSE]

    def made_order(self) -> Order:
        """Return the command that the fields mean. Raises InvalidInputError naming the one that is wrong."""
        return forms.order_of(self.form, self.values())

    def finding(self, order: Order) -> Piece:
        """Return what the command would do."""
        return preview(order, self.owner.shown)

    def _say(self, finding: Piece) -> None:
        self._finding = finding
        self.refresh_text()

    def asking(self) -> list[Line]:
        form, cells = self.form, self.cells
        said = [(self._finding.text, self._finding.role), *((text, "warning") for text in form.remarks)]
        lines: list[Line] = [(), *(line(Piece(row, role)) for text, role in said for row in wrap(text, cells))]
        lines += labelled("changes  ", form.changes, cells) + labelled("leaves   ", form.keeps, cells)
        if form.if_plan is not None:
            against = f"based on plan v{form.if_plan}; refused if the plan changes first"
            lines += [line(Piece(row, "dim")) for row in wrap(against, cells)]
        return [*lines, (), *folded(self._last_line(), cells, _LAST_ROWS)]

    def _last_line(self) -> Line:
        if self.blocked:
            return line(Piece(f"{self.blocked}  ", "warning"), *CLOSES)
        if self.form.ask:
            asked = Piece(f"{self.form.ask} ", "strong")
            return line(asked, Piece("y", "key", "screen.yes"), "/", Piece("N", "key", "screen.close"))
        if self.idle:
            return line(Piece("enter", "key", "screen.close"), Piece(" or ", "label"), *CLOSES)
        return line(*key_words("enter", "sends  ", "screen.send"), *CLOSES)

    def action_yes(self) -> None:
        self._send()

    def action_no(self) -> None:
        if self.form.ask:
            self.action_close()

    def action_send(self) -> None:
        """Send; enter means no where only `y` sends."""
        if self.progress is not None:
            return
        self._judge()
        if self.form.ask or self.idle:
            self.action_close()
        else:
            self._send()

    def _send(self) -> None:
        if self.order is None or self.blocked or self.progress is not None:
            return
        for item in self.form.fields:
            self.query_one(f"#field-{item.name}").disabled = True
        self.owner.send_order(self.order, self)

    def telling(self, progress: forms.Progress) -> list[Line]:
        return [(), *followed(progress, self.owner.clock, self.cells), (), CLOSES]


def followed(progress: forms.Progress, clock: Clock, columns: int) -> list[Line]:
    """Return a command that was sent: what it says, when, and how far it has come, in lines of at most `columns`
    cells."""
    lines: list[Line] = [line(Piece(text, "strong")) for text in wrap(arguments.spoken(progress.order), columns)]
    lines.append(line(Piece(f"{clock.time_of(progress.sent_at)} ", "dim")))
    role = "bad" if progress.ended else "accent"
    return lines + [line(Piece(row, role)) for row in wrap(plain(forms.progress_line(progress)), columns)]


class StartDialog(CommandDialog):
    """Reads the file as it is named, and says what it would start or what is wrong with it."""

    def made_order(self) -> Order:
        """Raise InvalidInputError naming the file, and the setting that is wrong in it."""
        text = self.values()["file"].strip()
        if not text:
            raise InvalidInputError("run file", "give its path, such as examples/run.toml")
        path = Path(text).expanduser()
        if not path.is_file():
            raise InvalidInputError(text, "no such file on this machine: check the path")
        return Order("start-run", {"config": check_run_file(path, {}, local=self._agent_is_here()).message})

    def _agent_is_here(self) -> bool:
        try:
            return is_local(self.owner.address)
        except InvalidInputError:
            return False

    @property
    def _is_untouched(self) -> bool:
        return False  # what is wanted of an empty field is worth saying: an example of a path

    def finding(self, order: Order) -> Piece:
        """Return what the file would start."""
        config: dict[str, Any] = order.args["config"]
        run, batch = config.get("run", {}), config.get("batch", {})
        nodes = ", ".join(config.get("nodes", {})) or "every node of the cluster"
        unit = sample_unit(config.get("objective", {}).get("kind", ""))
        summary = f"{run.get('name')}: {run.get('steps'):,} steps of {batch.get('global')} {unit} on {nodes}"
        return Piece(clean(summary), "strong")


class BranchDialog(CommandDialog):
    """Starts a run from a checkpoint of another one, with settings changed."""

    def __init__(self, run: str) -> None:
        super().__init__(forms.branch_form(run))
        self._run = run

    def made_order(self) -> Order:
        """Raise InvalidInputError naming the field that is wrong."""
        values = self.values()
        step, settings = values["step"].strip(), values["settings"]
        try:
            words = shlex.split(settings)
        except ValueError as error:
            raise InvalidInputError("settings", str(error).lower()) from None
        given = {"branch": f"{self._run}@{step}" if step else self._run, **arguments.pairs(words, "settings")}
        args = verbs.parse_args("start-run", given)
        verbs.check("start-run", args)
        return Order("start-run", args)

    @property
    def _is_untouched(self) -> bool:
        return False  # empty fields mean something: what is worth saying
