"""The page of memory in which a trainer shows, without a message, which step and phase it is in.

Layout (little endian, 64 bytes): counter u64, pid u64, term u64, n u64, step u64, phase u64, changed_at f64 (Unix
seconds). The writer makes the counter odd, writes, makes it even; a reader that sees an odd counter reads again.
"""

import mmap
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from trainctl.protocol.messages import BUSY_PHASES

STATUS_PHASES = (
    "starting",
    "idle",
    *BUSY_PHASES,
    "sync",
    "optimizer",
    "commit",
    "evaluate",
    "checkpoint",
    "regroup",
    "probe",
    "sample",
    "profile",
)
_LAYOUT = struct.Struct("<QQQQQQd")
_SIZE = 64
_COUNTER = struct.Struct("<Q")


@dataclass(frozen=True)
class Status:
    pid: int
    term: int
    n: int
    step: int
    phase: str
    changed_at: float


class StatusWriter:
    """Owned by one trainer; `show` costs about a microsecond."""

    def __init__(self, path: Path, pid: int) -> None:
        with path.open("wb") as file:
            file.write(bytes(_SIZE))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _SIZE)
        self._pid, self._counter, self._term, self._n, self._step = pid, 0, 0, 0, 0
        self.phase = "starting"
        self.show("starting")

    def show(self, phase: str, step: int | None = None, generation: tuple[int, int] | None = None) -> None:
        if step is not None:
            self._step = step
        if generation is not None:
            self._term, self._n = generation
        self.phase = phase
        _COUNTER.pack_into(self._page, 0, self._counter + 1)
        self._counter += 2
        where = (self._term, self._n, self._step, STATUS_PHASES.index(phase))
        _LAYOUT.pack_into(self._page, 0, self._counter - 1, self._pid, *where, time.time())
        _COUNTER.pack_into(self._page, 0, self._counter)

    @property
    def step(self) -> int:
        return self._step

    @property
    def shown(self) -> int:
        """Return how often something was shown."""
        return self._counter // 2

    def close(self) -> None:
        self._page.close()


def read_status(path: Path) -> Status | None:
    """The status at `path`, or None if there is no page yet or it never held still."""
    for _ in range(100):
        try:
            raw = path.read_bytes()
        except OSError:
            return None
        if len(raw) < _LAYOUT.size:
            return None
        counter, pid, term, n, step, phase, changed_at = _LAYOUT.unpack_from(raw)
        if counter and counter % 2 == 0 and phase < len(STATUS_PHASES):
            return Status(pid, term, n, step, STATUS_PHASES[phase], changed_at)
    return None
