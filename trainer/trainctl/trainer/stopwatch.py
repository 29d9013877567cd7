"""Where a plan's time goes, phase by phase, shown on the status page while it goes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainctl.protocol.messages import Phases
from trainctl.protocol.statuspage import StatusWriter


class Stopwatch:
    """One plan's phases, in seconds by the monotonic clock; it starts when the wait for the plan began."""

    def __init__(self, status: StatusWriter, started: float) -> None:
        self._status = status
        self._started = started
        self._spent = dict.fromkeys(Phases.__struct_fields__, 0.0)
        self._spent["wait"] = time.perf_counter() - started

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time what is done within; an abandoned phase counts too."""
        self._status.show(name)
        begun = time.perf_counter()
        try:
            yield
        finally:
            self._spent[name] = self._spent.get(name, 0.0) + time.perf_counter() - begun

    def phases(self) -> Phases:
        return Phases(**{name: self._spent[name] for name in Phases.__struct_fields__})

    def seconds(self) -> float:
        """Since the wait for the plan began."""
        return time.perf_counter() - self._started
