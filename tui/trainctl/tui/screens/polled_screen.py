"""A screen that asks the agent for rows while it is open: Policies, Diagnosis and Profile are such."""

import abc
import math
from collections.abc import Hashable, Sequence
from typing import ClassVar, Generic, TypeVar

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import RunView
from trainctl.tui.screens.base import BaseScreen
from trainctl.tui.state.source import Source
from trainctl.tui.text.styled_line import Line, Piece, clean, filled, line, rule, wrap

Answer = TypeVar("Answer")
Row = TypeVar("Row")


class PolledScreen(BaseScreen, Generic[Answer, Row]):
    """One row for each thing of the answer, and the chosen one in full. The agent is asked only while it is open."""

    POLL_SECONDS: ClassVar[float]
    """Least time between two requests to the agent."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._answer: Answer | None = None
        self._problem = ""  # why there is no answer
        self._chosen: Hashable = None  # the key of a row
        self._asked: Hashable = None  # what the newest answer depended on
        self._asked_at, self._is_asking = -math.inf, False

    @property
    def answer(self) -> Answer | None:
        """Return the answer about the run shown; None before the agent has answered."""
        run = self.owner.shown.run
        return self._answer if self._answer is not None and run is not None and self.is_of(self._answer, run) else None

    @property
    @abc.abstractmethod
    def rows(self) -> Sequence[Row]:
        """Return the answer's rows; empty without one."""

    @property
    def cursor(self) -> int:
        """Return the place of the chosen row, which may have moved; the first if it is gone."""
        known = [self.key(row) for row in self.rows]
        return known.index(self._chosen) if self._chosen in known else 0

    @property
    def chosen(self) -> Row | None:
        return self.rows[self.cursor] if self.rows else None

    @abc.abstractmethod
    def is_of(self, answer: Answer, run: RunView) -> bool:
        """Return whether an answer is about a run."""

    @abc.abstractmethod
    def key(self, row: Row) -> Hashable:
        """Return what a row is known by in the next answer."""

    @abc.abstractmethod
    def depends_on(self, run: RunView) -> Hashable:
        """Return what the answer follows from: once it is another, the agent is asked again."""

    @abc.abstractmethod
    async def ask(self, client: Source, run: str) -> Answer:
        """Return the agent's answer. Raises TrainctlError."""

    @abc.abstractmethod
    def heading(self, answer: Answer | None) -> str:
        """Return the title of the rule above the rows."""

    @abc.abstractmethod
    def table(self, answer: Answer, columns: int, rows: int) -> list[Line]:
        """Return the rows and the chosen one in full: exactly `rows` lines of `columns` cells."""

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
        super().paint()
        run, now = self.owner.shown.run, self.owner.clock.monotonic()
        if run is None or self._is_asking or not self.is_current or now < self._asked_at + self.POLL_SECONDS:
            return
        wanted = run.run, self.depends_on(run)
        if wanted != self._asked:
            self._asked_at, self._is_asking = now, True
            self.run_worker(self._ask(run.run, wanted), group="polled")

    async def _ask(self, run: str, wanted: Hashable) -> None:
        """Ask the agent; a request that failed is repeated, for a paused run has no next step that would ask again."""
        try:
            client = self.owner.client
            if client is not None:
                self._answer, self._problem = await self.ask(client, run), ""
            self._asked = wanted
        except TrainctlError as error:
            self._answer, self._problem = None, str(error)
        finally:
            self._is_asking = False
        self.paint()

    # ------------------------------------------------------------ drawing

    def lines(self, columns: int, rows: int) -> list[Line]:
        owner, answer = self.owner, self.answer
        drawn = [self.head(columns), rule(columns, (0, self.heading(answer), "title"))]
        if answer is not None:
            return [*drawn, *self.table(answer, columns, rows - 2)]
        words = self._problem or "asking the agent" if owner.shown.run is not None else "no run"
        body = [line(Piece(text, "dim")) for text in wrap(clean(words), columns)]
        return filled([*drawn, *body], columns, rows)

    # ------------------------------------------------------------ actions

    def action_move(self, by: int) -> None:
        self.action_choose_at(self.cursor + by)

    def action_choose_at(self, index: int) -> None:
        """Move the cursor to a place."""
        if self.rows:
            self._chosen = self.key(self.rows[min(max(index, 0), len(self.rows) - 1)])
            self.paint()
