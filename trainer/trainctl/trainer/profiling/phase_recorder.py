"""A recorder of wall times alone, for a library without a profiler: our phases as a Chrome trace."""

import contextlib
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec

_NO_OPERATORS = "MLX records no operators: the trace has only the wall times of the phases"


class PhaseRecorder:
    """Ranges between the step that warms up and `stop`."""

    def __init__(self) -> None:
        self.lacks = _NO_OPERATORS
        self._ranges: list[tuple[str, int, int]] = []  # name, begin, end, in nanoseconds of perf_counter
        self._is_recording = False
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def start(self) -> None:
        """Nothing has to warm up."""

    def range(self, name: str) -> AbstractContextManager[object]:
        return self._timed(name) if self._is_recording else contextlib.nullcontext()

    @contextlib.contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        begun = time.perf_counter_ns()
        try:
            yield
        finally:
            self._ranges.append((name, begun, time.perf_counter_ns()))

    def step_ended(self) -> None:
        self._is_recording = True

    def stop(self) -> None:
        self._is_recording = False

    def write(self, path: Path) -> None:
        pid = os.getpid()
        events = [
            {
                "ph": "X", "cat": "user_annotation", "name": name, "pid": pid, "tid": pid,
                "ts": (self._epoch + begun) / 1e3, "dur": (ended - begun) / 1e3,
            }
            for name, begun, ended in self._ranges
        ]  # fmt: skip
        path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))
