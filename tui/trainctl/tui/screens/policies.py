"""The policies of the run: what each sees, would do next and did; their modes are changed here, and actions undone."""

from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import PolicyStatus, RunView
from trainctl.tui.commands import undo
from trainctl.tui.commands.command import Order
from trainctl.tui.commands.context import UNWATCHED
from trainctl.tui.commands.verb_description import NoInverse
from trainctl.tui.dialogs import undo_picker
from trainctl.tui.screens import policies_view
from trainctl.tui.screens.polled_screen import PolledScreen
from trainctl.tui.state import effects
from trainctl.tui.state.effects import PolicyReport
from trainctl.tui.state.source import Source
from trainctl.tui.text.styled_line import Line, key_words


class PoliciesScreen(PolledScreen[PolicyReport, PolicyStatus]):
    """One row for each policy, and the chosen one in full."""

    POLL_SECONDS = 1.0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next policy", show=False),
        Binding("up,k", "move(-1)", "previous policy", show=False),
        Binding("enter,m", "mode", "mode", show=False, tooltip="change the policy's mode"),
        Binding("o", "off", "off", show=False, tooltip="turn the policy off at once"),
    ]

    @property
    def rows(self) -> tuple[PolicyStatus, ...]:
        return self.answer.told.policies if self.answer is not None else ()

    def is_of(self, answer: PolicyReport, run: RunView) -> bool:
        return answer.told.run == run.run

    def key(self, row: PolicyStatus) -> str:
        return row.name

    def depends_on(self, run: RunView) -> tuple[int, str]:
        """Return the step and the modes: another of them has other figures."""
        return run.step, str(run.policies)

    async def ask(self, client: Source, run: str) -> PolicyReport:
        return await effects.policy_report(client.lead, run, self.answer)

    def heading(self, answer: PolicyReport | None) -> str:
        return policies_view.title(answer)

    def table(self, answer: PolicyReport, columns: int, rows: int) -> list[Line]:
        keys = [
            key_words("enter", "mode", "screen.mode"),
            key_words("o", "off", "screen.off"),
            key_words("u", "undo its last command", "app.undo"),
        ]
        return policies_view.lines(answer, self.cursor, self.owner.clock, columns, rows, keys)

    # ------------------------------------------------------------ actions

    def action_mode(self) -> None:
        """Open the dialog of the policy's mode, which says what the mode may do to the curve."""
        if self.chosen is not None:
            self.owner.open_dialog("autopilot", {"name": self.chosen.name})

    def action_off(self) -> None:
        if self.chosen is not None and self.chosen.mode != "off":
            self.owner.send_order(Order("autopilot", {"name": self.chosen.name, "mode": "off"}), UNWATCHED)

    def undo(self) -> None:
        """Open the dialog of what undoes the chosen policy's last command, or say why nothing does."""
        if self.answer is None or self.chosen is None:
            return
        found = _inverse(self.answer, self.chosen, self.owner.shown.run)
        if isinstance(found, str):
            self.app.notify(f"can't undo: {found}", severity="warning", markup=False)
        else:
            undo_picker.open_undo(self.owner, found)


def _inverse(report: PolicyReport, policy: PolicyStatus, run: RunView | None) -> undo.Inverse | str:
    if not policy.actions:
        return f"{policy.name} has sent no command in this run"
    try:
        return undo.of(policy.actions[-1], run, report.events)
    except NoInverse as reason:
        return str(reason)
