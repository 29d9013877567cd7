"""Diagnosis: what makes the run slow or stuck, the evidence, what a step would take without it, and the remedy."""

import shlex
from itertools import pairwise
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol.messages import DiagnosisReply, DiagnosisRequest, Finding, Remedy, RunView
from trainctl.tui.commands.context import Values
from trainctl.tui.screens import diagnosis_view
from trainctl.tui.screens.polled_screen import PolledScreen
from trainctl.tui.state.source import Source
from trainctl.tui.text.styled_line import Line, clean, key_words


class DiagnosisScreen(PolledScreen[DiagnosisReply, Finding]):
    """One row for each finding, and the chosen one in full."""

    POLL_SECONDS = 3.0
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next finding", show=False),
        Binding("up,k", "move(-1)", "previous finding", show=False),
        Binding("enter,f", "remedy", "remedy", show=False, tooltip="open the dialog of the finding's first remedy"),
    ]

    @property
    def rows(self) -> tuple[Finding, ...]:
        return self.answer.diagnosis.findings if self.answer is not None else ()

    def is_of(self, answer: DiagnosisReply, run: RunView) -> bool:
        return answer.run == run.run

    def key(self, row: Finding) -> tuple[str, str]:
        return row.cause, row.node

    def depends_on(self, run: RunView) -> tuple[int, str, float]:
        """Return an active run also depends on the time: one that hangs makes no step that would ask for it."""
        return run.step, run.state, self.owner.clock.monotonic() if self.owner.shown.active else 0.0

    async def ask(self, client: Source, run: str) -> DiagnosisReply:
        return await client.lead.ask(DiagnosisRequest, run)

    def heading(self, answer: DiagnosisReply | None) -> str:
        return diagnosis_view.title(answer)

    def table(self, answer: DiagnosisReply, columns: int, rows: int) -> list[Line]:
        return diagnosis_view.lines(answer, self.cursor, columns, rows, self._keys())

    def _keys(self) -> list[Line]:
        if self.chosen is None or not self.chosen.remedies:
            return []
        return [
            key_words("enter", "dialog of the first command", "screen.remedy"),
            key_words("y", "copy its command", "app.copy"),
        ]

    def values(self) -> Values:
        """Return the commands of the chosen finding's remedies."""
        known = self.chosen.remedies if self.chosen is not None else ()
        found = tuple((remedy.text, remedy.command) for remedy in known if remedy.command)
        return (*found, *super().values())

    # ------------------------------------------------------------ actions

    def action_remedy(self) -> None:
        """Open the dialog of the first remedy that is a command to the run; say what to do if none is, or if the run
        has ended or is played from its record."""
        if self.answer is None or self.chosen is None or not self.chosen.remedies:
            return
        remedy = next((remedy for remedy in self.chosen.remedies if remedy.verb), None)
        if remedy is not None and self.answer.live:
            self.owner.open_dialog(remedy.verb, values_of(remedy))
        else:
            first = self.chosen.remedies[0]
            words = f"{first.text}: {first.command}" if first.command else first.text
            self.owner.notify(clean(words), severity="information", markup=False)


def values_of(remedy: Remedy) -> dict[str, str]:
    """Return the values that the command's dialog starts with, by field: of `trainctl send VERB FIELD=VALUE --node
    NODE` each field and the node."""
    words = shlex.split(remedy.command)
    pairs = dict(word.split("=", 1) for word in words if "=" in word)
    node = next((after for before, after in pairwise(words) if before == "--node"), None)
    return {**pairs, **({"node": node} if node is not None else {})}
