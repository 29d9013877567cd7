"""The split dialog: who takes how many samples, what that is predicted to do, and how the command fares."""

from dataclasses import replace
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from trainctl.tui.commands import forms
from trainctl.tui.commands import share_editor as sp
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.context import AppContext, KeyHint, context_of
from trainctl.tui.dialogs import split_view
from trainctl.tui.dialogs.command_dialog import followed, labelled
from trainctl.tui.terminal.frame_batching import OneFrame
from trainctl.tui.text.glyphs import Glyphs
from trainctl.tui.text.styled_line import Line, Piece, clean, line, wrap
from trainctl.tui.widgets.line_view import Lines
from trainctl.tui.widgets.repaintable import Repaintable

_OTHER_ROWS = 14
"""Rows of the dialog that are no node's, its border included."""
_LEAST_ROWS = 7
"""Those it can't do without."""
_SIDES = 6
"""Columns of its border and its padding."""
_TYPED_KEYS = {**{digit: digit for digit in "0123456789"}, "percent_sign": "%", "backspace": "backspace"}


class SplitDialog(OneFrame, ModalScreen[None], Repaintable):
    """Edits the shares, sends `rebalance`, and shows how far it has come. Escape closes; the command goes on."""

    # All of one kind, and that kind priority: keys of one burst act in the order they came.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close", priority=True),
        Binding("enter", "send", "send", priority=True),
        Binding("up,k,shift+tab", "choose(-1)", "previous node", show=False, priority=True),
        Binding("down,j,tab", "choose(1)", "next node", show=False, priority=True),
        Binding("left,minus", "move(-1)", "a sample to another", show=False, priority=True),
        Binding("right,plus", "move(1)", "a sample from another", show=False, priority=True),
        Binding("a", "auto", "by own rates", show=False, priority=True),
        Binding("u", "undo", "former shares", show=False, priority=True),
        *(Binding(key, f"type({text!r})", "type", show=False, priority=True) for key, text in _TYPED_KEYS.items()),
    ]

    def __init__(self, form: forms.Form, split: sp.Split, glyphs: Glyphs) -> None:
        super().__init__()
        self.form, self.split, self._glyphs = form, split, glyphs
        self.progress: forms.Progress | None = None
        self._remark = ""

    @property
    def _owner(self) -> AppContext:
        return context_of(self)

    def compose(self) -> ComposeResult:
        box = Vertical(id="split")
        box.border_title = self.form.title
        with box:
            yield Lines(self._glyphs, id="dialog-text", grow=True)

    def on_mount(self) -> None:
        self.set_class(self._glyphs.ascii_only, "ascii")
        self._show()

    def on_resize(self) -> None:
        self._show()

    def paint(self) -> None:
        """Brings it up to date with the run: the plan can move on meanwhile."""
        self._show()

    # ------------------------------------------------------------ editing

    def action_choose(self, by: int) -> None:
        self._edit(sp.choose(self.split, by))

    def action_pick(self, index: int) -> None:
        self._edit(sp.choose(self.split, index - self.split.chosen))

    def action_type(self, key: str) -> None:
        self._edit(sp.type_key(self.split, key))

    def action_move(self, by: int) -> None:
        self._edit(sp.move(self.split, by))

    def action_give(self, index: int, by: int) -> None:
        self._edit(sp.move(sp.choose(self.split, index - self.split.chosen), by))

    def action_auto(self) -> None:
        self._edit(sp.auto(self.split))

    def action_undo(self) -> None:
        """The plan's shares, or the former ones; of a plan that has moved on, its new ones; after a command has ended,
        those before it."""
        if self._outdated:
            self.form, self.split = self._now()
            self._show()
        elif self.progress is None:
            self._edit(sp.undo(self.split))
        elif self.progress.ended:
            self._reopen(self.progress)

    def _edit(self, split: sp.Split) -> None:
        if self.progress is None and not self.form.blocked:
            self.split, self._remark = split, ""
            self._show()

    def _reopen(self, ended: forms.Progress) -> None:
        """Edit again, from the plan as it is now; what was applied is proposed to be undone."""
        before, sent = tuple(seat.share for seat in self.split.seats), self.split.shares
        reply = ended.reply
        self.form, made = self._now()
        if reply is not None and reply.state == "applied" and len(made.seats) == len(before):
            # The reply can be here before the run's new view: the plan it made is what counts.
            seats = [replace(seat, share=share) for seat, share in zip(made.seats, sent, strict=True)]
            made = replace(made, seats=tuple(seats), shares=before, former=before)
            self.form = replace(self.form, if_plan=reply.plan_version or self.form.if_plan)
        self.split, self.progress = made, None
        self._show()

    def _now(self) -> tuple[forms.Form, sp.Split]:
        """The form and the split of the plan as it is, the same node chosen."""
        state = self._owner.shown
        made = sp.opened(state)
        chosen = min(self.split.chosen, max(len(made.seats) - 1, 0))
        return forms.form("rebalance", state), replace(made, chosen=chosen)

    @property
    def _outdated(self) -> bool:
        """Whether the plan has moved on from the one that this was computed against."""
        run, plan = self._owner.shown.run, self.form.if_plan
        return self.progress is None and run is not None and plan is not None and run.plan_version > plan

    # ------------------------------------------------------------ sending

    def action_send(self) -> None:
        split = self.split
        if self.progress is not None or self.form.blocked or self._owner.read_only or split.problem:
            return
        if not split.changed:
            self._remark = "nothing to send: this is the plan's split"
            self._show()
        else:
            self._owner.send_order(
                Order("rebalance", split.args, None, self.form.run, self.form.if_plan, self.form.id), self
            )

    def hints(self) -> list[KeyHint]:
        """What its keys do now, for the bottom line."""
        close = KeyHint("esc", "close", "screen.close", "escape")
        if self.progress is not None:
            return (
                [KeyHint("u", self._again(self.progress), "screen.undo", "u"), close]
                if self.progress.ended
                else [close]
            )
        if self.form.blocked or self._owner.read_only:
            return [close]
        return [KeyHint("enter", "send", "screen.send", "enter"), close]

    @staticmethod
    def _again(ended: forms.Progress) -> str:
        """What `u` does after a command has ended."""
        applied = ended.reply is not None and ended.reply.state == "applied"
        return "the former shares again" if applied else "edits again"

    @property
    def watching(self) -> bool:
        return self.is_mounted and self in self.app.screen_stack

    def follow(self, progress: forms.Progress) -> None:
        """Shows how far the command has come."""
        self.progress = progress
        if self.watching:
            self._show()

    def action_close(self) -> None:
        self.dismiss()

    # ------------------------------------------------------------ what it says

    def _show(self) -> None:
        if not self.query("#dialog-text"):  # a key can come before the first compose
            return
        columns, height = self._owner.size
        cells = split_view.cells_in(columns - _SIDES)
        room = max(height - _OTHER_ROWS, min(len(self.split.seats), height - _LEAST_ROWS), 3)
        made = split_view.rows(self.split, room, self._glyphs, cells) if self.split.seats else []
        if self.progress is None:
            made += self._asking(cells, height - 2 - len(made))
        else:
            made += [(), *self._telling(self.progress, cells)]
        self.query_one("#dialog-text", Lines).show(made)

    def _asking(self, cells: int, rows: int) -> list[Line]:
        """What is wrong and the keys; between them, as far as `rows` go, what else there is to say."""
        form = self.form
        made = [line(Piece(text, role)) for said, role in self._remarks() for text in wrap(clean(said), cells)]
        last = self._last_lines(cells)
        against = f"computed against plan v{form.if_plan}; refused if that has moved on"
        extra: list[list[Line]] = [
            labelled("changes  ", form.changes, cells), labelled("leaves   ", form.keeps, cells),
            [line(Piece(against, "dim"))] if form.if_plan is not None and not self._outdated else [],
            *([line(Piece(text, "dim"))] for text in forms.way_back(self._owner.shown)),
        ]  # fmt: skip
        blanks = 2 if rows >= len(made) + len(last) + 3 else 0
        for lines in extra:
            if len(made) + len(lines) + len(last) + blanks <= rows:
                made += lines
        gap: list[Line] = [()] * (blanks // 2)
        return [*gap, *made, *gap, *last]

    def _remarks(self) -> list[tuple[str, str]]:
        """(text, role) of what stands in the way, and of an Enter that had nothing to send."""
        said = [(self.split.problem, "bad"), (self._remark, "warning")]
        if self._outdated:
            run = self._owner.shown.run
            version = run.plan_version if run is not None else 0
            said.insert(0, (f"the plan is v{version} now, this was computed against v{self.form.if_plan}: u reloads",
                            "warning"))  # fmt: skip
        said += [(text, "warning") for text in self.form.remarks]
        return [(text, role) for text, role in said if text]

    def _last_lines(self, cells: int) -> list[Line]:
        if self._owner.read_only:
            return [line(Piece("read-only: commands are off for this screen", "warning"))]
        if self.form.blocked:
            return [line(Piece(self.form.blocked, "warning"))]
        return split_view.keys_lines(self._glyphs, cells)

    def _telling(self, progress: forms.Progress, cells: int) -> list[Line]:
        made = followed(progress, self._owner.clock, self._glyphs, cells)
        keys = [Piece("esc", "key", "screen.close"), Piece(" closes", "label", "screen.close")]
        if progress.ended:
            words = f" {self._again(progress)}  "
            keys = [Piece("u", "key", "screen.undo"), Piece(words, "label", "screen.undo"), *keys]
        return [*made, (), line(*keys)]
