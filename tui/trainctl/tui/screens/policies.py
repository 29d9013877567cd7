"""The policies of the run: what each sees, would do next and did; their modes are changed here, and actions undone."""

import math
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.tui.commands import undo
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.dispatch import send_unwatched
from trainctl.tui.commands.verb_description import NoInverse
from trainctl.tui.dialogs import undo_picker
from trainctl.tui.screens import policies_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.state import policy_report
from trainctl.tui.state.policy_report import PolicyReport
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.styled_line import Line, Piece, rule

ASK_SECONDS = 1.0
"""Least time between two requests to the agent while the screen is open."""


class PoliciesScreen(BaseScreen):
    """One row for each policy, and the chosen one in full. The agent is asked only while the screen is open."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next policy", show=False),
        Binding("up,k", "move(-1)", "previous policy", show=False),
        Binding("enter,m", "mode", "mode", show=False, tooltip="change the policy's mode"),
        Binding("o", "off", "off", show=False, tooltip="turn the policy off at once"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._report: PolicyReport | None = None
        self._problem, self._chosen = "", ""  # why there is no report; a policy's name
        self._asked: tuple[str, int, str] | None = None  # run, step and modes of the newest request, unless it failed
        self._asked_at, self._is_asking = -math.inf, False

    @property
    def report(self) -> PolicyReport | None:
        """Of the run shown; None before the agent has answered."""
        run = self.owner.shown.run
        known = self._report is not None and run is not None and self._report.told.run == run.run
        return self._report if known else None

    @property
    def policies(self) -> tuple[m.PolicyStatus, ...]:
        return self.report.told.policies if self.report is not None else ()

    @property
    def cursor(self) -> int:
        names = [policy.name for policy in self.policies]
        return names.index(self._chosen) if self._chosen in names else 0

    @property
    def chosen(self) -> m.PolicyStatus | None:
        return self.policies[self.cursor] if self.policies else None

    # ------------------------------------------------------------ asking the agent

    def on_screen_resume(self) -> None:
        self._ask_at_once()
        super().on_screen_resume()

    def arrived(self) -> None:
        self._ask_at_once()
        self.paint()

    def _ask_at_once(self) -> None:
        self._asked, self._asked_at = None, -math.inf

    def paint(self) -> None:
        """Another step, or another mode, has other figures."""
        super().paint()
        run, now = self.owner.shown.run, self.owner.clock.monotonic()
        wanted = (run.run, run.step, str(run.policies)) if run is not None else None
        is_due = now >= self._asked_at + ASK_SECONDS
        if wanted is not None and wanted != self._asked and is_due and not self._is_asking and self.is_current:
            self._asked, self._asked_at, self._is_asking = wanted, now, True
            self.run_worker(self._ask(wanted[0]), group="policies")

    async def _ask(self, run: str) -> None:
        try:
            client = self.owner.client
            if client is not None:
                self._report, self._problem = await policy_report.ask(client, run, self._report), ""
        except TrainctlError as error:
            self._report, self._problem = None, str(error)
            self._asked = None  # a paused run has no next step that would ask again
        finally:
            self._is_asking = False
        self.paint()

    # ------------------------------------------------------------ drawing

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner, report = self.owner, self.report
        head = rule(columns, owner.glyphs.horizontal, (0, policies_view.title(report, owner.glyphs), "title"))
        made = [self.head(columns), head]
        if report is None:
            words = self._problem or "asking the agent" if owner.shown.run is not None else "no run"
            body = [ln.line(Piece(text, "dim")) for text in ln.wrap(ln.clean(words), columns)]
            return [ln.fit(line, columns) for line in [*made, *body, *([()] * rows)][:rows]]
        keys = [ln.key_words("enter", "mode", "screen.mode"), ln.key_words("o", "off", "screen.off"),
                ln.key_words("u", "undo its last command", "app.undo")]  # fmt: skip
        clock = owner.clock
        return [*made, *policies_view.lines(report, self.cursor, clock, columns, rows - 2, owner.glyphs, keys)]

    # ------------------------------------------------------------ actions

    def action_move(self, by: int) -> None:
        self.action_choose_at(self.cursor + by)

    def action_choose_at(self, index: int) -> None:
        """The cursor to a place."""
        if self.policies:
            self._chosen = self.policies[min(max(index, 0), len(self.policies) - 1)].name
            self.paint()

    def action_mode(self) -> None:
        """The dialog of the policy's mode, which says what the mode may do to the curve."""
        if self.chosen is not None:
            self.owner.open_dialog("autopilot", {"name": self.chosen.name})

    def action_off(self) -> None:
        if self.chosen is not None and self.chosen.mode != "off":
            send_unwatched(self.owner, Order("autopilot", {"name": self.chosen.name, "mode": "off"}))

    def undo(self) -> None:
        """The dialog of what undoes the chosen policy's last command, or why nothing does."""
        if self.report is None or self.chosen is None:
            return
        found = _inverse(self.report, self.chosen, self.owner.shown.run)
        if isinstance(found, str):
            self.app.notify(f"can't undo: {found}", severity="warning", markup=False)
        else:
            undo_picker.open_undo(self.owner, found)


def _inverse(report: PolicyReport, policy: m.PolicyStatus, run: m.RunView | None) -> undo.Inverse | str:
    """What undoes a policy's last command, or why nothing does."""
    if not policy.actions:
        return f"{policy.name} has sent no command in this run"
    try:
        return undo.of(policy.actions[-1], run, report.events)
    except NoInverse as reason:
        return str(reason)
