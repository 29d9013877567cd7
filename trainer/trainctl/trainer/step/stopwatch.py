"""A stopwatch for a plan's phases, shown on the status page while they run."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from operator import itemgetter
from typing import Any

from trainctl.protocol.messages import PHASES, Phases
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.base import Backend, CompileMeter

Ranges = Callable[[str], AbstractContextManager[object]]
"""Makes a range of a phase in a profile."""
_in_order = itemgetter(*PHASES)


class Stopwatch:
    """One plan's phases, in seconds by the monotonic clock; it starts when the wait for the plan began."""

    def __init__(
        self, status: StatusWriter, started: float, meter: CompileMeter | None = None, ranges: Ranges | None = None
    ) -> None:
        """`meter`: of a compiler, whose time counts in no phase. `ranges`: of a step that is profiled."""
        self._status, self._ranges = status, ranges
        self._meter = meter or CompileMeter()
        self._compiled_before = self._meter.seconds
        self._started = started
        waited = time.perf_counter() - started
        self._marks: list[tuple[str, Any, Any]] = []
        self._spent = {**dict.fromkeys(PHASES, 0.0), "wait": waited}

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time what is done within; an abandoned phase counts too."""
        timed = Phase(self._status, self._spent, name, self._meter)
        return timed if self._ranges is None else _both(timed, self._ranges(name))

    @contextmanager
    def on_device(self, name: str, backend: Backend) -> Iterator[None]:
        """As `phase`; where the device works on after a call has returned, its own time, once `settle` is called."""
        begun = backend.mark()
        if begun is None:
            with self.phase(name):
                yield
            return
        self._status.show(name)
        compiled = self._meter.seconds
        if self._ranges is None:
            yield
        else:
            with self._ranges(name):
                yield
        self._spent[name] -= self._meter.seconds - compiled
        self._marks.append((name, begun, backend.mark()))

    def settle(self, backend: Backend) -> None:
        """Add the time of phases on the device, which has passed their end."""
        for name, begun, ended in self._marks:
            self._spent[name] += backend.seconds_between(begun, ended)
        for name in {name for name, _, _ in self._marks}:
            self._spent[name] = max(0.0, self._spent[name])  # the compiler may have begun before its pass on the device
        self._marks.clear()

    def phases(self) -> Phases:
        return Phases(*_in_order(self._spent))

    def compile_seconds(self) -> float:
        """What the compiler has taken in this plan."""
        return self._meter.seconds - self._compiled_before

    def seconds(self) -> float:
        """Since the wait for the plan began, without the compiler's."""
        return time.perf_counter() - self._started - self.compile_seconds()


@contextmanager
def _both(timed: "Phase", profiled: AbstractContextManager[object]) -> Iterator[None]:
    with timed, profiled:
        yield


class Phase:
    """A context manager written out, since a generator's would cost the loop twice as much."""

    __slots__ = ("_begun", "_meter", "_name", "_spent", "_status")

    def __init__(self, status: StatusWriter, spent: dict[str, float], name: str, meter: CompileMeter) -> None:
        self._status, self._spent, self._name, self._meter = status, spent, name, meter
        self._begun = 0.0

    def __enter__(self) -> None:
        self._status.show(self._name)
        self._begun = time.perf_counter() - self._meter.seconds

    def __exit__(self, *error: object) -> None:
        seconds = time.perf_counter() - self._meter.seconds - self._begun
        self._spent[self._name] = self._spent.get(self._name, 0.0) + seconds
