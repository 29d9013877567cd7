"""Recorders: what each backend's library can record of steps.

One starts before the step that warms up, follows the end of each step, and stops after the last one or early; then
nothing of it slows later steps. `range` names a part of the trace, which lasts as long as the context. `lacks` is what
the trace lacks on this device, and why; "": nothing. All but `write`, which makes a JSON file, is for the main thread.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import first_line

VARIABLE = "MTL_CAPTURE_ENABLED"
"""Environment variable of the trainer that Metal needs at its start to capture anything."""
NO_CAPTURE = (
    f"no Metal capture: {VARIABLE}=1 isn't set; give it to the node's agent (trainctl-agent install --env"
    f" {VARIABLE}=1), restart the agent and the run's trainer, and profile again"
)
CAPTURE = "capture.gputrace"


class TorchRecorder:
    """torch's profiler: operators, and on CUDA kernels, of `steps` steps after one that warms up. `start` raises
    TrainctlError."""

    def __init__(self, device: str, steps: int) -> None:
        import torch
        from torch.profiler import ProfilerActivity, profile, schedule

        self._torch, self._on_cuda = torch, device.startswith("cuda")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        plan = schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profile(activities=activities, schedule=plan, acc_events=False)
        no_kernels = "the trace has no kernels of the GPU: torch's profiler doesn't record Metal"
        self.lacks = no_kernels if device == "mps" else ""

    def start(self) -> None:
        if not self._torch.profiler.kineto_available():
            raise TrainctlError("this build of torch has no profiler (Kineto): install a build from PyPI")
        try:
            self._profile.start()
        except RuntimeError as error:
            raise TrainctlError(f"torch's profiler cannot start: {first_line(error)}") from None

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        # Ranges of NVTX are for programs such as Nsight Systems.
        nvtx = self._torch.cuda.nvtx.range(name) if self._on_cuda else contextlib.nullcontext()
        with self._torch.profiler.record_function(name), nvtx:
            yield

    def step_ended(self) -> None:
        self._profile.step()

    def stop(self) -> None:
        self._profile.stop()

    def write(self, path: Path) -> None:
        self._profile.export_chrome_trace(str(path))


class PhaseRecorder:
    """Wall times alone, of MLX, which has no profiler: our phases between the step that warms up and `stop`."""

    def __init__(self) -> None:
        self.lacks = "MLX records no operators: the trace has only the wall times of the phases"
        self._ranges: list[tuple[str, int, int]] = []  # name, begin, end, in nanoseconds of perf_counter
        self._is_recording = False
        self._epoch = time.time_ns() - time.perf_counter_ns()

    def start(self) -> None: ...

    @contextlib.contextmanager
    def range(self, name: str) -> Iterator[None]:
        is_recorded, begun = self._is_recording, time.perf_counter_ns()
        try:
            yield
        finally:
            if is_recorded:
                self._ranges.append((name, begun, time.perf_counter_ns()))

    def step_ended(self) -> None:
        self._is_recording = True

    def stop(self) -> None:
        self._is_recording = False

    def write(self, path: Path) -> None:
        event = {"ph": "X", "cat": "user_annotation", "pid": os.getpid(), "tid": os.getpid()}
        events = [
            event | {"name": name, "ts": (self._epoch + begun) / 1e3, "dur": (ended - begun) / 1e3}
            for name, begun, ended in self._ranges
        ]
        path.write_bytes(msgspec.json.encode({"displayTimeUnit": "ms", "traceEvents": events}))


class MetalRecorder(PhaseRecorder):
    """Wall times of MLX on Metal, and a capture of the first recorded step for Xcode; `metal` is `mlx.core.metal`."""

    def __init__(self, metal: Any, folder: Path) -> None:
        """`folder` gets the capture; it must not be there already."""
        super().__init__()
        self._metal, self._path = metal, folder / CAPTURE
        self._is_capturing = False
        self._is_possible = os.environ.get(VARIABLE) == "1"
        one_step = "the Metal capture has the first step only, because it keeps all buffers"
        self.lacks += f"; {one_step if self._is_possible else NO_CAPTURE}"

    def step_ended(self) -> None:
        super().step_ended()
        if self._is_possible:
            self._is_possible = False  # of further steps
            with self._noting_failures():
                self._metal.start_capture(str(self._path))
                self._is_capturing = True
        else:
            self._end()

    def stop(self) -> None:
        super().stop()
        self._end()

    def _end(self) -> None:
        if self._is_capturing:
            self._is_capturing = False
            with self._noting_failures():
                self._metal.stop_capture()

    @contextlib.contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            self.lacks += f"; the capture failed: {first_line(error)}"


Recorder = TorchRecorder | PhaseRecorder


def make_recorder(backend: Backend, steps: int, folder: Path) -> Recorder:
    """Return what records with the backend's library; `folder` gets captures."""
    if backend.name == "torch":
        return TorchRecorder(backend.device.name, steps)
    if backend.device.name.startswith("gpu"):
        import mlx.core as mx

        if mx.metal.is_available():
            return MetalRecorder(mx.metal, folder)
    return PhaseRecorder()
