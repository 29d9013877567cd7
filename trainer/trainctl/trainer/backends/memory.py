"""Memory of a trainer: what it holds on its device, and readings of it where no allocator keeps a peak."""

import functools
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import psutil

from trainctl.protocol.machine.facts import memory_limit

_STATUS, _STATM, _CLEAR_REFS = (Path("/proc/self") / name for name in ("status", "statm", "clear_refs"))
_STALE_SECONDS = 0.002
"""Seconds for which a reading holds; each costs some 20 microseconds."""
_PAGE_BYTES = resource.getpagesize()
_PEAK = re.compile(rb"VmHWM:\s+(\d+) kB")
_CAP_SECONDS = 1.0
"""Seconds for which a cap is not read again: a control group's may be changed at any time."""


@dataclass(frozen=True)
class Memory:
    """Bytes that the trainer holds on its device; None where that cannot be known."""

    used_bytes: int | None = None
    peak_bytes: int | None = None  # since `reset`
    cap_bytes: int | None = None
    cache_bytes: int | None = None  # kept by the allocator, and used by no array

    @functools.cached_property
    def values(self) -> dict[str, float]:
        """Return the numbers that are known, by the names of the metrics."""
        sizes = {"": self.used_bytes, "peak_": self.peak_bytes, "cap_": self.cap_bytes, "cache_": self.cache_bytes}
        return {f"memory_{name}bytes": float(size) for name, size in sizes.items() if size is not None}


@dataclass(frozen=True)
class MemoryByPart:
    """Bytes that a backend holds on its device in every step."""

    weights: int  # with what is kept beside them, and frozen ones
    gradients: int  # the accumulators
    moments: int
    libraries: int = 0  # what the process held beside weights and moments once the model was loaded

    def values(self, memory: Memory) -> dict[str, float]:
        """Return bytes by part, by the names of the metrics. Activations are what else the step's peak has: with
        logits, gradients in flight and the libraries' working memory."""
        parts = {"weights": self.weights, "gradients": self.gradients, "moments": self.moments}
        if memory.peak_bytes is not None:
            parts["activations"] = max(0, memory.peak_bytes - sum(parts.values()) - self.libraries)
        return {f"memory_{name}_bytes": float(size) for name, size in parts.items()}


def free_bytes(memory: Memory, *, of_host: bool) -> int:
    """Return what can still be taken of a device's memory. `of_host`: it is the machine's."""
    host: int = psutil.virtual_memory().available
    if memory.cap_bytes is None:
        return host
    own = max(0, memory.cap_bytes - (memory.used_bytes or 0))
    return min(own, host) if of_host else own


class DeviceMemory(Protocol):
    """Readings of a device's memory."""

    def read(self) -> Memory:
        """Return what is held now, and the peak."""

    def reset(self) -> None:
        """Begin a new peak, at what is held now."""

    def sample(self) -> object:
        """Take what is held now into the peak, where nothing else keeps one."""


class SampledMemory:
    """`held` gives what is held now, in bytes. The peak is the most that `sample` and `read` found since `reset`, so it
    misses what comes and goes between two of them."""

    def __init__(self, held: Callable[[], int], cap_bytes: int | None) -> None:
        self._held, self._cap = held, cap_bytes
        self._peak = 0

    def reset(self) -> None:
        self._peak = 0

    def sample(self) -> int:
        now = self._held()
        self._peak = max(self._peak, now)
        return now

    def read(self) -> Memory:
        return Memory(self.sample(), self._peak, self._cap)


class HostMemory:
    """Resident size, its peak, and the cap: the least of what the machine has, what `limit_bytes` says, and what the
    process's control groups may take.

    A step of 2 ms or more has its own peak. Shorter ones have that of all steps since the reading before, because
    asking the kernel costs some 20 microseconds. On Linux the kernel keeps the peak. Elsewhere, or where no new peak
    can be begun, it is the most that `sample` found.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        total = psutil.virtual_memory().total
        self._most = min(total, limit_bytes or total)
        self._cap, self._cap_at = self._most, float("-inf")
        process = psutil.Process()
        self._source = KernelPeak.begin() or SampledMemory(lambda: process.memory_info().rss, None)
        self.sample = self._source.sample  # takes what is held now into the peak, where the kernel doesn't
        self._read_at = float("-inf")
        self._last = Memory()
        self._was_read = False  # since the peak was begun

    def reset(self) -> None:
        """Begin a new peak, unless no one has seen the one that is being kept."""
        if self._was_read:
            self._was_read = False
            self._source.reset()

    def read(self) -> Memory:
        now = time.monotonic()
        if now - self._cap_at >= _CAP_SECONDS:
            self._cap_at, self._cap = now, min(self._most, memory_limit() or self._most)
        if now - self._read_at >= _STALE_SECONDS:
            self._read_at, self._was_read = now, True
            self._last = replace(self._source.read(), cap_bytes=self._cap)
        return self._last


class KernelPeak:
    """The peak of the resident size that Linux keeps; a new one begins when "5" is written to clear_refs
    (proc_pid_clear_refs(5)). getrusage(2) tells it fastest, but never less than before the process's program was
    executed; up to that it is read from status. Raises OSError where no new peak can be begun."""

    def __init__(self) -> None:
        self._clear_refs = _CLEAR_REFS.open("wb", buffering=0)
        self.reset()
        self._statm = _STATM.open("rb", buffering=0)
        most = _most_ever()
        self._before = most if most > _kept_peak() else 0

    @classmethod
    def begin(cls) -> "KernelPeak | None":
        """Begin a new peak; None where the kernel doesn't begin one."""
        try:
            return cls()
        except OSError:
            return None

    def reset(self) -> None:
        """Begin a new peak."""
        self._clear_refs.write(b"5")

    def sample(self) -> None:
        """Do nothing: the kernel misses nothing."""

    def read(self) -> Memory:
        self._statm.seek(0)
        held = int(self._statm.read(256).split()[1]) * _PAGE_BYTES
        most = _most_ever()
        return Memory(held, max(held, most if most > self._before else _kept_peak()))


def limit_process(limit_bytes: int) -> None:
    """Make allocations over `limit_bytes` of private memory fail in this process (Linux; elsewhere nothing is
    enforced)."""
    if sys.platform == "linux":
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        soft = limit_bytes if hard == resource.RLIM_INFINITY else min(limit_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _most_ever() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _kept_peak() -> int:
    match = _PEAK.search(_STATUS.read_bytes())
    return int(match[1]) * 1024 if match else 0
