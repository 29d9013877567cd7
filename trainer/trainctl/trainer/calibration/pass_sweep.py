"""The sweep over micro-batches 1, 2, 4 ... past the fastest one, then half-way to its neighbours."""

import time
from collections.abc import Callable
from typing import Final, Protocol

import msgspec

from trainctl.protocol.calibration.peak import FALLS, between, has_fallen, next_micro
from trainctl.protocol.calibration.profile import Pass
from trainctl.trainer.calibration.findings import Findings

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


class PassTimer(Protocol):
    """What times passes of a micro-batch; raises DeviceMemoryError where one doesn't fit."""

    def time_pass(self, micro: int) -> Pass: ...
    def time_again(self, known: Pass) -> Pass: ...


class Sweep:
    """`trying` receives each size before it is measured, and `found` what is known after it, and the newest part."""

    def __init__(
        self, timer: PassTimer, most: int, trying: Callable[[int], None], found: Callable[[Findings, Pass], None],
        clock: Callable[[], float] = time.monotonic, seconds: float = SWEEP_SECONDS,
    ) -> None:  # fmt: skip
        self._timer, self._most, self._trying, self._found = timer, most, trying, found
        self._clock, self._seconds = clock, seconds

    def run(self, known: Findings) -> Findings:
        """Measure what isn't known yet. Raises DeviceMemoryError after `trying` was called with the size."""
        deadline = self._clock() + self._seconds
        known = self._doubled(known, deadline)
        if not known.passes:
            return known
        known = self._again(known, [*known.passes], deadline)
        for _ in range(HALVINGS):
            for micro in between(known.passes, known.out_of_memory_micro):
                if self._is_in_time(known, micro, deadline):
                    known = self._measured(known, micro)
        for _ in range(ROUNDS):
            best = max(one.rate for one in known.passes)
            known = self._again(known, [one for one in known.passes if one.rate >= (1 - CLOSE) * best], deadline)
        return known

    def _doubled(self, known: Findings, deadline: float) -> Findings:
        """1, 2, 4 ... An end by falls is confirmed by another measurement of the sizes that decide it."""
        confirmed = 0
        while True:
            micro = next_micro(known.passes, self._most, known.out_of_memory_micro)
            if micro is not None and self._is_in_time(known, micro, deadline):
                known = self._measured(known, micro)
            elif known.passes and has_fallen(known.passes) and confirmed < len(known.passes):
                confirmed = len(known.passes)
                best = max(known.passes, key=lambda one: one.rate)
                known = self._again(known, [best, *known.passes[-FALLS:]], deadline)
            else:
                return known

    def _is_in_time(self, known: Findings, micro: int, deadline: float) -> bool:
        """Whether a new size would be measured before the deadline, if it is as fast as the best so far."""
        if not known.passes:
            return True
        return self._clock() + NEW_PASSES * micro / max(one.rate for one in known.passes) < deadline

    def _measured(self, known: Findings, micro: int) -> Findings:
        self._trying(micro)
        one = self._timer.time_pass(micro)
        known = known.with_pass(one)
        self._found(known, one)
        return known

    def _again(self, known: Findings, passes: list[Pass], deadline: float) -> Findings:
        """Some sizes once more, of which the faster measurement counts."""
        for one in passes:
            if self._clock() <= deadline:
                self._trying(one.micro)
                seconds = min(one.seconds, self._timer.time_again(one).seconds)
                one = msgspec.structs.replace(one, seconds=seconds)
                known = known.with_pass(one)
                self._found(known, one)
        return known
