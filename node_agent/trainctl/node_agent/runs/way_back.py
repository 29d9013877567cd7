"""When a run whose ranks were all lost is taken up from its newest checkpoint, and when that is given up."""

import time
from collections.abc import Callable

from trainctl.node_agent.conductor.restarts import LEAST_DELAY_SECONDS, STARTS, delay_seconds


class WayBack:
    """Counts the times that a run goes back without getting further than before, and waits longer after each."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.run: str | None = None  # that waits to be taken up
        self._last: tuple[str, int] | None = None  # the run that went back last, and how far it had come
        self._tries, self._due = 0, 0.0
        self._held_since: float | None = None
        self.reason = ""  # of the last loss

    def take(self, run: str, step: int, reason: str) -> bool:
        """A run has lost all its ranks at `step`; False if it goes back no more."""
        further = self._last is None or self._last[0] != run or step > self._last[1]
        self._tries = 0 if further else self._tries
        self._last = (run, step) if further else self._last
        self.reason = reason
        return self._wait(run)

    def again(self) -> bool:
        """The run that was due could not be taken up; False if that is tried no more."""
        return self._last is not None and self._wait(self._last[0])

    def hold(self, run: str) -> None:
        """The run that was due waits for nodes that are out of reach, which is no try; look again in a second."""
        self._held_since = self._clock() if self._held_since is None else self._held_since
        self.run, self._due = run, self._clock() + LEAST_DELAY_SECONDS

    @property
    def held_seconds(self) -> float:
        """How long it has waited for nodes."""
        return 0.0 if self._held_since is None else self._clock() - self._held_since

    def _wait(self, run: str) -> bool:
        self._held_since = None
        if self._tries >= STARTS:
            self.run = None
            return False
        self._due = self._clock() + delay_seconds(self._tries)
        self._tries, self.run = self._tries + 1, run
        return True

    def due(self) -> str | None:
        """The run whose time has come; it is handed out once."""
        if self.run is None or self._clock() < self._due:
            return None
        run, self.run = self.run, None
        return run

    def forget(self) -> str | None:
        """An operator begins something else; the run that waited, if one did."""
        waited, self.run, self._last, self._tries = self.run, None, None, 0
        return waited
