"""The time as the screens see it, in one object that tests replace by a frozen one."""

import datetime
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Clock:
    """`monotonic` measures ages; `wall` gives Unix seconds, times of day shown in `zone` (None: this machine's)."""

    zone: datetime.tzinfo | None = None

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
