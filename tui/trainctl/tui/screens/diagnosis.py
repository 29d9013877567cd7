"""Diagnosis: what makes the run slow or stuck, the evidence, what a step would take without it, and the remedy."""

import math
from typing import ClassVar

from textual.binding import Binding, BindingType

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.tui.commands import remedies
from trainctl.tui.dialogs import clipboard
from trainctl.tui.screens import diagnosis_view
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.styled_line import Line, Piece, rule

ASK_SECONDS = 3.0
"""Least time between two requests to the agent while the screen is open."""


class DiagnosisScreen(BaseScreen):
    """One row for each finding, and the chosen one in full. The agent is asked only while the screen is open."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("down,j", "move(1)", "next finding", show=False),
        Binding("up,k", "move(-1)", "previous finding", show=False),
        Binding("enter,f", "remedy", "remedy", show=False, tooltip="open the dialog of the finding's first remedy"),
    ]

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._told: m.DiagnosisReply | None = None
        self._problem, self._chosen = "", ("", "")  # why there is none; cause and node of a finding
        self._asked: tuple[str, int, str] | None = None  # run, step and state of the newest request that was answered
        self._asked_at, self._is_asking = -math.inf, False

    @property
    def told(self) -> m.DiagnosisReply | None:
        """Of the run shown; None before the agent has answered."""
        run = self.owner.shown.run
        return self._told if self._told is not None and run is not None and self._told.run == run.run else None

    @property
    def findings(self) -> tuple[m.Finding, ...]:
        return self.told.diagnosis.findings if self.told is not None else ()

    @property
    def cursor(self) -> int:
        """The place of the chosen finding, which may have moved; the first if it is gone."""
        known = [(finding.cause, finding.node) for finding in self.findings]
        return known.index(self._chosen) if self._chosen in known else 0

    @property
    def chosen(self) -> m.Finding | None:
        return self.findings[self.cursor] if self.findings else None

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
        """An active run is judged again and again: one that hangs makes no step that would ask for it."""
        super().paint()
        run, now = self.owner.shown.run, self.owner.clock.monotonic()
        if run is None or self._is_asking or not self.is_current or now < self._asked_at + ASK_SECONDS:
            return
        wanted = (run.run, run.step, run.state)
        if wanted != self._asked or self.owner.shown.active:
            self._asked_at, self._is_asking = now, True
            self.run_worker(self._ask(wanted), group="diagnosis")

    async def _ask(self, wanted: tuple[str, int, str]) -> None:
        try:
            client = self.owner.client
            if client is not None:
                self._told, self._problem, self._asked = await client.diagnosis(wanted[0]), "", wanted
        except TrainctlError as error:
            self._told, self._problem = None, str(error)
        finally:
            self._is_asking = False
        self.paint()

    # ------------------------------------------------------------ drawing

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner, told = self.owner, self.told
        head = rule(columns, owner.glyphs.horizontal, (0, diagnosis_view.title(told, owner.glyphs), "title"))
        made = [self.head(columns), head]
        if told is None:
            words = self._problem or "asking the agent" if owner.shown.run is not None else "no run"
            body = [ln.line(Piece(text, "dim")) for text in ln.wrap(ln.clean(words), columns)]
            return [ln.fit(line, columns) for line in [*made, *body, *([()] * rows)][:rows]]
        return [*made, *diagnosis_view.lines(told, self.cursor, columns, rows - 2, owner.glyphs, self._keys())]

    def _keys(self) -> list[Line]:
        if self.chosen is None or not self.chosen.remedies:
            return []
        return [
            ln.key_words("enter", "dialog of the first command", "screen.remedy"),
            ln.key_words("y", "copy its command", "app.copy"),
        ]

    def values(self) -> clipboard.Values:
        """The commands of the chosen finding's remedies."""
        known = self.chosen.remedies if self.chosen is not None else ()
        found = tuple((remedy.text, remedy.command) for remedy in known if remedy.command)
        return (*found, *super().values())

    # ------------------------------------------------------------ actions

    def action_move(self, by: int) -> None:
        self.action_choose_at(self.cursor + by)

    def action_choose_at(self, index: int) -> None:
        """The cursor to a place."""
        if self.findings:
            finding = self.findings[min(max(index, 0), len(self.findings) - 1)]
            self._chosen = finding.cause, finding.node
            self.paint()

    def action_remedy(self) -> None:
        """The dialog of the first remedy that is a command to the run; what to do if none is, or if the run has ended
        or is played from its record."""
        if self.told is None or self.chosen is None or not self.chosen.remedies:
            return
        remedy = remedies.first_command(self.chosen.remedies)
        if remedy is not None and self.told.live:
            self.owner.open_dialog(remedy.verb, remedies.values_of(remedy))
        else:
            first = self.chosen.remedies[0]
            words = f"{first.text}: {first.command}" if first.command else first.text
            self.owner.notify(ln.clean(words), severity="information", markup=False)
