"""What this process holds of the machine's memory, for backends that compute on the CPU."""

import resource
import sys
import time

import psutil

from trainctl.trainer.backends.protocol import Memory

_STALE_SECONDS = 0.5


class HostMemory:
    """Resident size and its peak; read at most twice a second, since asking the kernel costs more than a report may."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._process = psutil.Process()
        self._cap = limit_bytes or psutil.virtual_memory().total
        self._read_at = float("-inf")
        self._last = Memory()

    def read(self) -> Memory:
        now = time.monotonic()
        if now - self._read_at >= _STALE_SECONDS:
            used = self._process.memory_info().rss
            self._last = Memory(used, max(used, _peak_bytes()), self._cap)
            self._read_at = now
        return self._last


def limit_process(limit_bytes: int) -> None:
    """Make allocations over `limit_bytes` of private memory fail in this process (Linux; elsewhere nothing is
    enforced)."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _peak_bytes() -> int:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
