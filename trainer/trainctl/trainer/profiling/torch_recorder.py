"""The torch profiler: operators, and on CUDA kernels, in our phases as ranges."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from trainctl.trainer.common.errors import first_line
from trainctl.trainer.profiling.recorder import CannotProfileError


class TorchRecorder:
    """Records `steps` steps after one that warms up."""

    def __init__(self, device: str, steps: int) -> None:
        self._on_cuda = device.startswith("cuda")
        self._steps = steps
        self._profile: profile | None = None
        self.lacks = (
            "the trace has no kernels of the GPU: torch's profiler doesn't record Metal" if device == "mps" else ""
        )

    def start(self) -> None:
        if not torch.profiler.kineto_available():
            raise CannotProfileError("this build of torch has no profiler (Kineto): install a build from PyPI")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_cuda else [])]
        made = profile(
            activities=activities, schedule=schedule(wait=0, warmup=1, active=self._steps, repeat=1), acc_events=False
        )
        try:
            made.start()
        except RuntimeError as error:
            raise CannotProfileError(f"torch's profiler cannot start: {first_line(error)}") from None
        self._profile = made

    def range(self, name: str) -> AbstractContextManager[object]:
        return _with_nvtx(name) if self._on_cuda else record_function(name)

    def step_ended(self) -> None:
        assert self._profile is not None
        self._profile.step()

    def stop(self) -> None:
        assert self._profile is not None
        self._profile.stop()

    def write(self, path: Path) -> None:
        assert self._profile is not None
        made, self._profile = self._profile, None
        made.export_chrome_trace(str(path))


@contextlib.contextmanager
def _with_nvtx(name: str) -> Iterator[None]:
    """A range in the trace, and one for programs such as Nsight Systems."""
    with record_function(name), torch.cuda.nvtx.range(name):
        yield
