"""The sweep over micro-batches 1, 2, 4 ... past the fastest one, then half-way to its neighbours; and whole steps of
one effective batch, cut into micro-batches of each size that fits.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Final

import msgspec

from trainctl.protocol.calibration.peak import FALLS, between, has_fallen, next_micro
from trainctl.protocol.calibration.profile import GridPoint, Pass
from trainctl.trainer.calibration.measurements import StepRunner, StepTime
from trainctl.trainer.common.errors import DeviceMemoryError

SWEEP_SECONDS: Final = 18.0
"""Time for the sweep of a calibration of 60 s: what would take longer isn't begun, but for the smallest micro-batch."""
HALVINGS: Final = 2
"""Times that sizes half-way between the fastest micro-batch and its neighbours are measured."""
CLOSE: Final = 0.25
"""Part of the best rate within which micro-batches are measured again, in turns, so that a disturbance of some seconds
doesn't decide between them."""
NEW_PASSES: Final = 3
"""Passes that a new size takes at least."""
ROUNDS: Final = 4
"""Times that close ones are measured again."""
GRID_SECONDS: Final = 6.0
"""Time for steps of all sizes of a calibration of 60 s; one that would take longer isn't begun, but the fastest is
always measured, by a step of fewer samples if need be."""
STEPS: Final = 3
"""Steps of each size, of which the median counts, if they are short."""
LONG_SECONDS: Final = 0.5
"""Time of a step above which it is measured once."""


class Sweep:
    """Passes and steps that were measured. A size that runs out of memory isn't tried again, nor a larger one."""

    def __init__(
        self, timer: StepRunner, changed: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`changed` is called after each measurement, with a line for people, which may be empty."""
        self._timer, self._changed, self._clock = timer, changed, clock
        self._passes: dict[int, Pass] = {}
        self._points: dict[int, GridPoint] = {}
        self._updates: list[float] = []
        self.out_of_memory_micro: int | None = None

    @property
    def passes(self) -> tuple[Pass, ...]:
        """The passes by micro-batch, ascending."""
        return tuple(self._passes[micro] for micro in sorted(self._passes))

    @property
    def grid(self) -> tuple[GridPoint, ...]:
        """The steps by micro-batch, ascending."""
        return tuple(self._points[micro] for micro in sorted(self._points))

    @property
    def update_seconds(self) -> float | None:
        """Time of a step beside its passes; None: no step was measured."""
        return statistics.median(self._updates) if self._updates else None

    def measure_passes(self, most: int, seconds: float = SWEEP_SECONDS) -> None:
        """Measure passes of micro-batches up to `most`, in about so many seconds."""
        deadline = self._clock() + seconds
        self._double(most, deadline)
        self._repeat(self.passes, deadline)
        for _ in range(HALVINGS if self._passes else 0):
            for micro in between(self.passes, self.out_of_memory_micro):
                if self._is_in_time(micro, deadline):
                    self._measure(micro)
        for _ in range(ROUNDS if self._passes else 0):
            best = max(timed.rate for timed in self.passes)
            self._repeat([timed for timed in self.passes if timed.rate >= (1 - CLOSE) * best], deadline)

    def _double(self, most: int, deadline: float) -> None:
        """1, 2, 4 ... An end by falls is confirmed by another measurement of the sizes that decide it."""
        confirmed = 0
        while True:
            micro = next_micro(self.passes, most, self.out_of_memory_micro)
            if micro is not None and self._is_in_time(micro, deadline):
                self._measure(micro)
            elif self._passes and has_fallen(self.passes) and confirmed < len(self._passes):
                confirmed = len(self._passes)
                best = max(self.passes, key=lambda timed: timed.rate)
                self._repeat([best, *self.passes[-FALLS:]], deadline)
            else:
                return

    def _is_in_time(self, micro: int, deadline: float) -> bool:
        """Return whether a new size may fit and would be measured before the deadline, if it is as fast as the best."""
        if not self._passes or micro >= (self.out_of_memory_micro or math.inf):
            return not self._passes
        return self._clock() + NEW_PASSES * micro / max(timed.rate for timed in self.passes) < deadline

    def _measure(self, micro: int) -> None:
        try:
            self._take(self._timer.time_pass(micro))
        except DeviceMemoryError:
            self._lack_memory_for(micro)

    def _repeat(self, passes: Sequence[Pass], deadline: float) -> None:
        """Measure some sizes once more; the faster measurement counts."""
        for timed in passes:
            if timed.micro in self._passes and self._clock() <= deadline:
                try:
                    seconds = min(timed.seconds, self._timer.time_again(timed).seconds)
                except DeviceMemoryError:
                    self._lack_memory_for(timed.micro)
                else:
                    self._take(msgspec.structs.replace(timed, seconds=seconds))

    def _take(self, measured: Pass) -> None:
        self._passes[measured.micro] = measured
        self._changed(f"micro-batch {measured.micro}: {measured.rate:.4g} samples/s")

    def _lack_memory_for(self, micro: int) -> None:
        """Forget this micro-batch and larger ones, whatever was measured before."""
        self.out_of_memory_micro = min(micro, self.out_of_memory_micro or micro)
        self._passes = {size: timed for size, timed in self._passes.items() if size < micro}
        self._points = {size: point for size, point in self._points.items() if size < micro}
        self._changed(f"micro-batch {micro}: out of memory")

    def measure_steps(self, effective: int, seconds: float = GRID_SECONDS) -> None:
        """Measure steps of each micro-batch of at most `effective` samples, the fastest first."""
        deadline = self._clock() + seconds
        for timed in sorted(self.passes, key=lambda timed: -timed.rate):
            left = deadline - self._clock()
            is_in_time = effective / timed.rate < left
            if timed.micro not in self._passes or timed.micro > effective or not (is_in_time or not self._points):
                continue
            if not is_in_time:
                effective = timed.micro * max(1, int(left * timed.rate / timed.micro))
            try:
                steps = [self._timer.step(timed.micro, effective)]
                if steps[0].seconds < LONG_SECONDS:
                    steps += [self._timer.step(timed.micro, effective) for _ in range(STEPS - 1)]
            except DeviceMemoryError:
                self._lack_memory_for(timed.micro)
                continue
            median = statistics.median(step.seconds for step in steps)
            self._points[timed.micro] = GridPoint(timed.micro, math.ceil(effective / timed.micro), median)
            self._updates += [step.optimizer_seconds for step in steps]
            self._passes[timed.micro] = _fastest(timed, effective, steps)
            self._changed("")


def _fastest(timed: Pass, effective: int, steps: Sequence[StepTime]) -> Pass:
    """Return a pass with the mean seconds of one in the fastest step, if that was faster: otherwise what disturbed its
    measurement would make steps look faster than their passes."""
    count, rest = divmod(effective, timed.micro)
    if rest:
        return timed
    fastest = min(step.seconds - step.optimizer_seconds for step in steps) / count
    return timed if fastest >= timed.seconds else msgspec.structs.replace(timed, seconds=max(fastest, 1e-9))
