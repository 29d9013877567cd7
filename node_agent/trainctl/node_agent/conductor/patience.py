"""How long a run that is to stop waits for ranks that say nothing: pure, the clock is an argument."""

from trainctl.node_agent.conductor.deadlines import Waits
from trainctl.node_agent.conductor.state import Book

STOP_SECONDS, STOP_TIMES = 30.0, 5.0
"""Without anything that brings the end nearer for so long, or for so many times as long as the plan in progress should
take if that is longer, a stopping run ends as it is."""


class Patience:
    """Told of every event; what a hung rank's heartbeat says is no news."""

    def __init__(self, book: Book, waits: Waits) -> None:
        self._book, self._waits = book, waits
        self._mark: object = None
        self._since = 0.0

    def look(self, now: float) -> None:
        """After an event: has anything moved?"""
        first = self._waits.first
        said = (first.plan.seq, len(first.soon)) if first is not None else None
        mark = (self._book.durable.mode, self._book.stage, self._book.progress.step, self._waits.awaited, said)
        if mark != self._mark:
            self._mark, self._since = mark, now

    def lost_seconds(self, now: float) -> float:
        """For how long a stopping run has waited in vain; 0 as long as there is hope."""
        waits_on = self._book.durable.mode != "stopping" or self._book.stage == "leaving" or self._waits.has_deadline
        limit_seconds = max(STOP_SECONDS, STOP_TIMES * self._waits.expected_seconds)
        return 0.0 if waits_on or now < self._since + limit_seconds else now - self._since
