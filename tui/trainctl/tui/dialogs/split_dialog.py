"""The split dialog: who takes how many samples, what that is predicted to do, and how the command fares."""

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import DryRun
from trainctl.tui.commands import forms, share_editor
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.context import KeyHint, ask_lead
from trainctl.tui.commands.forms import Form
from trainctl.tui.commands.share_editor import Seat, Split
from trainctl.tui.commands.verbs import DESCRIPTIONS
from trainctl.tui.dialogs.command_dialog import CommandDialog, OrderDialog, followed
from trainctl.tui.dialogs.popup import CLOSE, CLOSES, SEND, SIDES
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text.formatting import NA, percent, seconds, used_of
from trainctl.tui.text.styled_line import (
    Line,
    Piece,
    clean,
    fit,
    groups,
    key_words,
    labelled,
    line,
    pad_left,
    shorten,
    width,
    wrap,
)
from trainctl.tui.widgets.inline_bars import share_bar
from trainctl.tui.widgets.line_view import Repaintable

SPLIT_CELLS = 70
"""Width of every line, where there is room."""
_NODE, _BAR = 12, 12
_OTHERS = SPLIT_CELLS - _NODE - _BAR


def _widths(cells: int) -> tuple[int, int]:
    return (_NODE, _BAR) if cells >= SPLIT_CELLS else (min(cells - _OTHERS, _NODE), 0)


def split_rows(split: Split, room: int, cells: int) -> list[Line]:
    """Return the table with its sum; of more nodes than `room` those around the chosen one."""
    first = min(max(split.chosen - room + 1, 0), max(len(split.seats) - room, 0))
    name, bar = _widths(cells)
    head = f"{'':2}{'NODE':{name}}{'SAMPLES':>11} {'PART':>5} {'':{bar}}{'OWN/S':>7}{'STEP':>9}{'MEM GB':>10}"
    lines = [fit(line(Piece(head, "label")), cells)]
    lines += [_split_row(split, index, cells) for index in range(first, min(first + room, len(split.seats)))]
    return [*lines, _sum_row(split, cells)]


def _split_row(split: Split, index: int, cells: int) -> Line:
    room, bar = _widths(cells)
    seat, share = split.seats[index], split.shares[index]
    chosen = index == split.chosen
    name = shorten(clean(seat.node), room - 1)
    typing = chosen and split.typed
    number = f"{split.typed}_" if typing else str(share)
    role = "bad" if typing and split.problem else "strong" if share == seat.share else "accent"
    part = share / split.total if split.total else 0.0
    pieces = (
        Piece("▸".ljust(2) if chosen else "  ", "key"),
        Piece(name.ljust(room), "cursor" if chosen else "text", f"screen.pick({index})"),
        Piece(" - ", "key", f"screen.give({index}, -1)"),
        *pad_left((Piece(number, role),), 5),
        Piece(" + ", "key", f"screen.give({index}, 1)"),
        Piece(f" {percent(part):>5} ", "label"),
        *fit((share_bar(part, bar - 1),), bar),
        Piece(f"{_rate(seat):>7}", "text"),
        *pad_left(_seconds(split, index), 9),
        *pad_left(_memory(split, seat), 10),
    )
    return fit(pieces, cells)


def _rate(seat: Seat) -> str:
    rate = seat.rate
    return NA if rate is None else f"{rate:.2f}" if rate < 9.95 else f"{rate:.1f}" if rate < 99.5 else f"{rate:.0f}"


def _seconds_of(split: Split, seat: Seat) -> float | None:
    """Return a node's own seconds of a step: predicted if its settings change, else those of its last one."""
    one = split.rank_of(seat)
    return one.seconds if one is not None else seat.seconds


def _seconds(split: Split, index: int) -> Line:
    took, every = _seconds_of(split, split.seats[index]), [_seconds_of(split, seat) for seat in split.seats]
    slowest = took is not None and None not in every and took == max(one or 0.0 for one in every)
    return line(Piece(seconds(took), "dim" if took is None else "strong" if slowest else "text"))


def _memory(split: Split, seat: Seat) -> Line:
    """Return the memory as measured, or as the lead predicts it, which may be a bound."""
    one = split.rank_of(seat)
    of = one if one is not None else seat
    peak, cap = of.memory_bytes, of.memory_cap_bytes
    if peak is None:
        return line(Piece(NA, "dim"))
    return line(Piece(f"{'≤' if one is not None and one.memory_is_bound else ''}{used_of(peak, cap)}"))


def _sum_row(split: Split, cells: int) -> Line:
    said = split.foreseen
    now, then = (said.step_seconds_before, said.step_seconds) if said is not None else (None, None)
    text = f"step {seconds(now)}" if now is not None else "step n/a: the lead has no prediction"
    if split.changed and now and then:
        faster = f"{100 * (now / then - 1):+.0f}% {split.unit}/s"
        text = f"step {seconds(now)} → {seconds(then)}, {faster}"
    total = f"{sum(split.shares)} of {split.total}"
    head = f"{'':2}{'together'[: _widths(cells)[0]]:{_widths(cells)[0]}}{total:>11}"
    return fit(line(Piece(head, "label"), "   ", Piece(text, "strong")), cells)


def split_keys(cells: int) -> list[Line]:
    """Return what the keys do, in one line or two; a click on one does it."""
    hints = (
        ("↑↓", " node", ""),
        ("-+", " move", ""),
        ("0-9 %", " type", ""),
        ("a", " auto", "screen.auto"),
        ("u", " undo", "screen.undo"),
        ("enter", " sends", "screen.send"),
        ("esc", " closes", "screen.close"),
    )
    parts = [line(Piece(key, "key", action), Piece(words, "label", action)) for key, words, action in hints]
    whole = groups(parts, sum(map(width, parts)) + 2 * len(parts))
    return [whole] if width(whole) <= cells else [groups(parts[:3], cells), groups(parts[3:], cells)]


_OTHER_ROWS = 14
"""Rows of the dialog that are no node's, its border included."""
_LEAST_ROWS = 7
"""Rows that it can't do without."""
_AGAIN = "edits again"
_TYPED_KEYS = {**{digit: digit for digit in "0123456789"}, "percent_sign": "%", "backspace": "backspace"}


class SplitDialog(OrderDialog, Repaintable):
    """Edits the shares, and sends `rebalance`."""

    # All of one kind, and that kind priority: keys of one burst act in the order they came.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "send", "send", priority=True),
        Binding("up,k,shift+tab", "choose(-1)", "previous node", show=False, priority=True),
        Binding("down,j,tab", "choose(1)", "next node", show=False, priority=True),
        Binding("left,minus", "move(-1)", "give away a sample", show=False, priority=True),
        Binding("right,plus", "move(1)", "take a sample", show=False, priority=True),
        Binding("a", "auto", "by own rates", show=False, priority=True),
        Binding("u", "undo", "previous shares", show=False, priority=True),
        *(Binding(key, f"type({text!r})", "type", show=False, priority=True) for key, text in _TYPED_KEYS.items()),
    ]

    def __init__(self, form: forms.Form, split: share_editor.Split) -> None:
        super().__init__(form)
        self.split = split
        self._remark = ""

    def on_mount(self) -> None:
        self._ask()

    def _ask(self) -> None:
        """Have the lead say what the split would do."""
        if not self.form.blocked:
            split = self.split
            ask_lead(self.owner, Order("rebalance", split.args), lambda said: self._foresee(split, said))

    def _foresee(self, asked: Split, said: DryRun | None) -> None:
        if asked is self.split and self.progress is None and self.is_attached:
            self.split = share_editor.foresee(asked, said)
            self.refresh_text()

    def paint(self) -> None:
        """Bring it up to date with the run: the plan can move on meanwhile."""
        self.refresh_text()

    # ------------------------------------------------------------ editing

    def action_choose(self, by: int) -> None:
        self._edit(share_editor.choose(self.split, by))

    def action_pick(self, index: int) -> None:
        self._edit(share_editor.choose(self.split, index - self.split.chosen))

    def action_type(self, key: str) -> None:
        self._edit(share_editor.type_key(self.split, key))

    def action_move(self, by: int) -> None:
        self._edit(share_editor.move(self.split, by))

    def action_give(self, index: int, by: int) -> None:
        self._edit(share_editor.move(share_editor.choose(self.split, index - self.split.chosen), by))

    def action_auto(self) -> None:
        self._edit(share_editor.auto(self.split))

    def action_undo(self) -> None:
        """Take the plan's shares or the former ones; new ones if the plan has moved on or the command failed."""
        if self._outdated or (self.progress is not None and self.progress.ended):
            self.form, self.split = self._now()
            self.progress = None
            self.refresh_text()
            self._ask()
        else:
            self._edit(share_editor.undo(self.split))

    def _edit(self, split: share_editor.Split) -> None:
        if self.progress is None and not self.form.blocked:
            self.split, self._remark = split, ""
            self.refresh_text()
            self._ask()

    def _now(self) -> tuple[forms.Form, share_editor.Split]:
        state = self.owner.shown
        made = share_editor.opened(state)
        chosen = min(self.split.chosen, max(len(made.seats) - 1, 0))
        return forms.form("rebalance", state), replace(made, chosen=chosen)

    @property
    def _outdated(self) -> bool:
        run, plan = self.owner.shown.run, self.form.if_plan
        return self.progress is None and run is not None and plan is not None and run.plan_version > plan

    # ------------------------------------------------------------ sending

    def action_send(self) -> None:
        split = self.split
        if self.progress is not None or self.blocked or split.problem:
            return
        if not split.changed:
            self._remark = "nothing to send: the plan already has this split"
            self.refresh_text()
        else:
            form = self.form
            self.owner.send_order(
                Order("rebalance", split.args, None, form.run, form.if_plan, form.id, undoes=form.undoes), self
            )

    def hints(self) -> list[KeyHint]:
        """Return what its keys do now, for the bottom line."""
        if self.progress is not None and self.progress.ended:
            return [KeyHint("u", _AGAIN, "screen.undo", "u"), CLOSE]
        return [CLOSE] if self.progress is not None or self.blocked else [SEND, CLOSE]

    # ------------------------------------------------------------ what it says

    @property
    def cells(self) -> int:
        return min(SPLIT_CELLS, max(self.app.size.width - SIDES, _OTHERS + 6))

    def _table(self) -> list[Line]:
        height, seats = self.app.size.height, len(self.split.seats)
        room = max(height - _OTHER_ROWS, min(seats, height - _LEAST_ROWS), 3)
        return split_rows(self.split, room, self.cells) if seats else []

    def asking(self) -> list[Line]:
        """Return the table, what is wrong and the keys; between them, as far as the rows go, what else there is to
        say."""
        form, cells, table = self.form, self.cells, self._table()
        rows = self.app.size.height - 2 - len(table)
        drawn = [line(Piece(text, role)) for said, role in self._remarks() for text in wrap(clean(said), cells)]
        last = [line(Piece(self.blocked, "warning"))] if self.blocked else split_keys(cells)
        against = f"based on plan v{form.if_plan}; refused if the plan changes first"
        extra: list[list[Line]] = [
            labelled("changes  ", form.changes, cells),
            labelled("leaves   ", form.keeps, cells),
            [line(Piece(against, "dim"))] if form.if_plan is not None and not self._outdated else [],
            *([line(Piece(text, "dim"))] for text in forms.way_back(self.owner.shown)),
        ]
        blanks = 2 if rows >= len(drawn) + len(last) + 3 else 0
        for lines in extra:
            if len(drawn) + len(lines) + len(last) + blanks <= rows:
                drawn += lines
        gap: list[Line] = [()] * (blanks // 2)
        return [*table, *gap, *drawn, *gap, *last]

    def _remarks(self) -> list[tuple[str, str]]:
        """Return text and role of what stands in the way, and of an Enter that had nothing to send."""
        forecast = self.split.forecast
        refused = forecast.refused if forecast is not None else ""
        said = [(self.split.problem or refused, "bad"), (self._remark, "warning"), (self.split.micros_changed, "text")]
        if self._outdated:
            run = self.owner.shown.run
            version = run.plan_version if run is not None else 0
            said.insert(
                0, (f"the plan is now v{version}; this was based on v{self.form.if_plan}: u reloads", "warning")
            )
        said += [(text, "warning") for text in self.form.remarks]
        return [(text, role) for text, role in said if text]

    def telling(self, progress: forms.Progress) -> list[Line]:
        lines = [*self._table(), (), *followed(progress, self.owner.clock, self.cells)]
        again = key_words("u", f"{_AGAIN}  ", "screen.undo") if progress.ended else ()
        return [*lines, (), (*again, *CLOSES)]


def dialog_of(form: Form, state: ViewState, rank: int | None, shares: Mapping[str, int] | None = None) -> OrderDialog:
    """Return the dialog of a form. `rank`: the selected one; `shares`: those to propose, by node."""
    if DESCRIPTIONS[form.verb].dialog == "form":
        return CommandDialog(form)
    split = share_editor.opened(state, rank)
    wanted = tuple((shares or {}).get(seat.node, seat.share) for seat in split.seats)
    return SplitDialog(form, replace(split, shares=wanted) if shares and sum(wanted) == split.total else split)
