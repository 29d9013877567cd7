"""Memory of a trainer where no allocator keeps a peak: host memory on a CPU, and sampled memory."""

import re
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from trainctl.trainer.backends.base import Memory

_STALE_SECONDS = 0.1
_STATUS, _CLEAR_REFS = Path("/proc/self/status"), Path("/proc/self/clear_refs")
_SIZES = re.compile(rb"VmHWM:\s+(\d+) kB\nVmRSS:\s+(\d+) kB")


class SampledMemory:
    """`held` gives what is held now, in bytes. The peak is the most that `sample` and `read` found since `reset`, so it
    misses what comes and goes between two of them."""

    def __init__(self, held: Callable[[], int], cap_bytes: int | None) -> None:
        self._held, self._cap = held, cap_bytes
        self._peak = 0

    def reset(self) -> None:
        """Begin a new peak."""
        self._peak = 0

    def sample(self) -> int:
        """What is held now."""
        now = self._held()
        self._peak = max(self._peak, now)
        return now

    def read(self) -> Memory:
        return Memory(self.sample(), self._peak, self._cap)


class HostMemory:
    """Resident size and its peak. Both are read at most ten times a second, since asking the kernel costs more than a
    report may; the peak is that of all steps since the reading before, so a shorter step's is not lost.

    Linux keeps the peak, and begins a new one when "5" is written to clear_refs (proc_pid_clear_refs(5)). Where that
    can't be done the peak is the most that `sample` found.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        self._cap = limit_bytes or psutil.virtual_memory().total
        process = psutil.Process()
        self._sampled = None if _reset_peak() else SampledMemory(lambda: process.memory_info().rss, self._cap)
        self._read_at = float("-inf")
        self._last = Memory()
        self._was_read = False  # since the peak was begun

    def reset(self) -> None:
        """Begin a new peak, unless no one has seen the one that is being kept."""
        if not self._was_read:
            return
        self._was_read = False
        if self._sampled is not None:
            self._sampled.reset()
        else:
            _reset_peak()

    def sample(self) -> None:
        """Take what is held now into the peak, where the kernel doesn't."""
        if self._sampled is not None:
            self._sampled.sample()

    def read(self) -> Memory:
        now = time.monotonic()
        if now - self._read_at >= _STALE_SECONDS:
            self._read_at, self._was_read = now, True
            self._last = self._sampled.read() if self._sampled is not None else _kept_by_kernel(self._cap)
        return self._last


def limit_process(limit_bytes: int) -> None:
    """Make allocations over `limit_bytes` of private memory fail in this process (Linux; elsewhere nothing is
    enforced)."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _reset_peak() -> bool:
    """Whether the kernel began a new peak."""
    try:
        _CLEAR_REFS.write_bytes(b"5")
    except OSError:
        return False
    return True


def _kept_by_kernel(cap_bytes: int) -> Memory:
    found = _SIZES.search(_STATUS.read_bytes())
    peak, now = (int(size) * 1024 for size in found.groups()) if found else (None, None)
    return Memory(now, peak, cap_bytes)
