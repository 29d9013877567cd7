"""The split dialog: who takes how many samples, what that is predicted to do, and how the command fares."""

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen

from trainctl.tui import control, split_view
from trainctl.tui import split as sp
from trainctl.tui.calls import Order
from trainctl.tui.dialogs import followed, labelled
from trainctl.tui.glyphs import Glyphs
from trainctl.tui.lines import Line, Piece, clean, line, wrap
from trainctl.tui.widgets import Lines

if TYPE_CHECKING:
    from trainctl.tui.app import TrainctlApp

_OTHER_ROWS = 14
"""Rows of the dialog that are no node's, its border included."""
_TYPED_KEYS = {"percent_sign": "%", "backspace": "backspace"}


class SplitDialog(ModalScreen[None]):
    """Edits the shares, sends `rebalance`, and shows how far it has come. Escape closes; the command goes on."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "close", "close", priority=True),
        Binding("enter", "send", "send"),
        Binding("up,k,shift+tab", "choose(-1)", "previous node", show=False),
        Binding("down,j,tab", "choose(1)", "next node", show=False),
        Binding("left,minus", "move(-1)", "a sample to another", show=False),
        Binding("right,plus", "move(1)", "a sample from another", show=False),
        Binding("a", "auto", "by own rates", show=False),
        Binding("u", "undo", "former shares", show=False),
    ]

    def __init__(self, form: control.Form, split: sp.Split, glyphs: Glyphs) -> None:
        super().__init__()
        self.form, self.split, self._glyphs = form, split, glyphs
        self.progress: control.Progress | None = None

    @property
    def _owner(self) -> "TrainctlApp":
        return cast("TrainctlApp", self.app)

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

    def on_key(self, event: events.Key) -> None:
        """What is typed as a number, in the order it came."""
        key = _TYPED_KEYS.get(event.key) or (event.character if event.character and event.character.isdecimal() else "")
        if key and event.key != "enter":
            event.stop()
            self._edit(sp.type_key(self.split, key))

    # ------------------------------------------------------------ editing

    def action_choose(self, by: int) -> None:
        self._edit(sp.choose(self.split, by))

    def action_pick(self, index: int) -> None:
        self._edit(sp.choose(self.split, index - self.split.chosen))

    def action_move(self, by: int) -> None:
        self._edit(sp.move(self.split, by))

    def action_give(self, index: int, by: int) -> None:
        self._edit(sp.move(sp.choose(self.split, index - self.split.chosen), by))

    def action_auto(self) -> None:
        self._edit(sp.auto(self.split))

    def action_undo(self) -> None:
        """The plan's shares, or the former ones; after a command has ended, those before it."""
        if self.progress is None:
            self._edit(sp.undo(self.split))
        elif self.progress.ended:
            self._reopen(self.progress)

    def _edit(self, split: sp.Split) -> None:
        if self.progress is None and not self.form.blocked:
            self.split = split
            self._show()

    def _reopen(self, ended: control.Progress) -> None:
        """Edit again, from the plan as it is now; what was applied is proposed to be undone."""
        before, sent = tuple(seat.share for seat in self.split.seats), self.split.shares
        state, reply = self._owner.shown, ended.reply
        self.form, made = control.form("rebalance", state), sp.opened(state)
        if reply is not None and reply.state == "applied" and len(made.seats) == len(before):
            # The reply can be here before the run's new view: the plan it made is what counts.
            seats = [replace(seat, share=share) for seat, share in zip(made.seats, sent, strict=True)]
            made = replace(made, seats=tuple(seats), shares=before, former=before)
            self.form = replace(self.form, if_plan=reply.plan_version or self.form.if_plan)
        self.split, self.progress = replace(made, chosen=min(self.split.chosen, len(made.seats) - 1)), None
        self._show()

    # ------------------------------------------------------------ sending

    def action_send(self) -> None:
        split = self.split
        if self.progress is not None or self.form.blocked or self._owner.read_only or split.problem:
            return
        if split.changed:
            self._owner.send_order(Order("rebalance", split.args, None, self.form.run, self.form.if_plan), self)

    @property
    def watching(self) -> bool:
        return self.is_mounted and self in self.app.screen_stack

    def follow(self, progress: control.Progress) -> None:
        """Shows how far the command has come."""
        self.progress = progress
        if self.watching:
            self._show()

    def action_close(self) -> None:
        self.dismiss()

    # ------------------------------------------------------------ what it says

    def _show(self) -> None:
        room = max(self._owner.size.height - _OTHER_ROWS, 3)
        made = split_view.rows(self.split, room, self._glyphs) if self.split.seats else []
        made += [(), *(self._asking() if self.progress is None else self._telling(self.progress))]
        self.query_one("#dialog-text", Lines).show(made)

    def _asking(self) -> list[Line]:
        form, cells = self.form, split_view.CELLS
        made = [line(Piece(text, "bad")) for text in wrap(clean(self.split.problem), cells) if text]
        made += labelled("changes  ", form.changes, cells) + labelled("leaves   ", form.keeps, cells)
        if form.if_plan is not None:
            made.append(line(Piece(f"computed against plan v{form.if_plan}; refused if that has moved on", "dim")))
        return [*made, (), self._last_line()]

    def _last_line(self) -> Line:
        if self._owner.read_only:
            return line(Piece("read-only: commands are off for this screen", "warning"))
        if self.form.blocked:
            return line(Piece(self.form.blocked, "warning"))
        return split_view.keys_line(self._glyphs)

    def _telling(self, progress: control.Progress) -> list[Line]:
        made = followed(progress, self._owner.clock, self._glyphs, split_view.CELLS)
        keys = [Piece("esc", "key", "screen.close"), Piece(" closes", "label", "screen.close")]
        if progress.ended:
            applied = progress.reply is not None and progress.reply.state == "applied"
            words = " the former shares again  " if applied else " edits again  "
            keys = [Piece("u", "key", "screen.undo"), Piece(words, "label", "screen.undo"), *keys]
        return [*made, (), line(*keys)]
