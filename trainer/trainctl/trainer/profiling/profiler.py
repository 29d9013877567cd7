"""A rank's profile: arms the recorder by a plan, records the steps that follow, and writes the trace meanwhile."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import psutil

from trainctl.protocol import messages as m
from trainctl.protocol.files.durable_files import rename
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common import atomic_folder
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.profiling.recorder import CannotProfileError, Recorder
from trainctl.trainer.profiling.trace_process import TRACE, Written

MOST_SECONDS = 120.0
"""Seconds after which recording ends with the step in progress: memory holds all events until then."""
MOST_GROWTH_BYTES = 1_000_000_000
"""Growth of the process's resident memory, after the step that warms up, at which recording ends with the step."""
LEAST_FREE_BYTES = 2_000_000_000
"""Free disk space below which nothing is recorded or written: a trace may have several hundred MB."""
TRACES_KEPT = 8
"""Newest traces of a rank that are kept; older ones are removed."""
REPEATS = 20
"""Heartbeats that repeat the outcome, for an agent that was away."""
LAST_SECONDS, KILL_SECONDS = 5.0, 1.0
"""Seconds that a leaving trainer waits for its trace; for the last of them, the process that compresses it is gone."""
NICENESS = 10
"""Niceness of the process that compresses the trace: a tenth of what a training thread gets of a busy core."""

_LEFT = "the rank left before its trace was written"
_PLANS = {
    "evaluate": "an evaluation", "checkpoint": "a checkpoint", "sample": "a sample", "sync": "a sync of the weights",
    "measure": "a measurement", "probe": "a comparison of the models", "defragment": "a clearing of caches",
}  # fmt: skip
"""What ends a recording: memory would hold its events too."""

Range = Callable[[str], AbstractContextManager[object]]


class Profiler:
    """`arm`, `before`, `step`, `step_ended` and `close` are for the main thread, `state` for the control thread. No
    error of a recorder leaves it: the profile fails, and training continues."""

    def __init__(
        self, run: str, rank: int, folder: Path, backend: Backend, send: Callable[[m.FromTrainer], None],
        show: Callable[[Range | None], None],
    ) -> None:  # fmt: skip
        """`folder` gets the traces. `show` is given what makes a range of each phase; None: nothing is recorded."""
        self._run, self._rank, self._folder, self._backend = run, rank, folder, backend
        self._send, self._show = send, show
        self._recording: _Recording | None = None
        self._writer: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._starting, self._is_closing = threading.Lock(), False
        self._newest: m.ProfileWritten | None = None
        self._repeats = 0

    def arm(self, plan: m.StepPlan) -> str | None:
        """Record `plan.profile_steps` steps after the next one; or the reason why not."""
        if self._recording is not None or (self._writer is not None and self._writer.is_alive()):
            return "a profile of this rank is in progress: wait for its event, then send the command again"
        begun, work = time.perf_counter(), self._folder / f".rank-{self._rank}.{os.getpid()}.part"
        try:
            atomic_folder.remove_parts(self._folder)
            work.mkdir(parents=True, exist_ok=True)
            check_space(work)
            recorder = make_recorder(self._backend, plan.profile_steps, work)
            recorder.start()
        except Exception as error:  # noqa: BLE001  whatever the library raises
            shutil.rmtree(work, ignore_errors=True)
            return first_line(error)
        self._recording = _Recording(recorder, plan, work)
        self._recording.loop_seconds = time.perf_counter() - begun
        self._show(recorder.range)
        return None

    def before(self, kind: m.PlanKind) -> None:
        """A plan is next. One that trains no step ends the recording; before the step that warms up nothing is
        recorded yet."""
        at, what = self._recording, _PLANS.get(kind)
        if at is None or what is None or not at.is_warm:
            return
        if at.recorded:
            at.end_early(f"ended before {what}")
            self._end(at)
        else:
            self._give_up(at, f"{what} came before the first recorded step; send the command again")

    def step(self, step: int) -> AbstractContextManager[object]:
        """A range of a whole step, where one is recorded."""
        at = self._recording
        return at.recorder.range(f"step {step}") if at is not None else contextlib.nullcontext()

    def step_ended(self, step: int) -> None:
        """A step has been reported."""
        at = self._recording
        if at is None:
            return
        begun = time.perf_counter()
        try:
            at.recorder.step_ended()
            at.count(step)
        except Exception as error:  # noqa: BLE001  whatever the library raises
            self._give_up(at, first_line(error))
            return
        at.loop_seconds += time.perf_counter() - begun
        if at.is_over:
            self._end(at)

    def _end(self, at: "_Recording") -> None:
        """Stop recording; the trace is written by another thread."""
        begun = time.perf_counter()
        try:
            at.recorder.stop()
        except Exception as error:  # noqa: BLE001  whatever the library raises
            self._give_up(at, first_line(error))
            return
        self._recording = None
        self._show(None)
        at.loop_seconds += time.perf_counter() - begun
        self._writer = threading.Thread(target=self._finish, args=(at,), name="profile", daemon=True)
        self._writer.start()

    def _give_up(self, at: "_Recording", problem: str) -> None:
        """The recorder is stopped all the same: torch ends with a segmentation fault if its profiler runs at exit."""
        self._recording = None
        self._show(None)
        with contextlib.suppress(Exception):
            at.recorder.stop()
        shutil.rmtree(at.work, ignore_errors=True)
        log.error("no profile: %s", problem)
        self._tell(self._failed(at, problem))

    def state(self) -> m.ProfileWritten | None:
        """What a heartbeat repeats."""
        self._repeats -= 1
        return self._newest if self._repeats >= 0 else None

    def close(self) -> None:
        """Wait a while for the trace to be written; a recording in progress is given up."""
        if self._recording is not None:
            self._give_up(self._recording, "the rank left before all steps were recorded")
        if self._writer is not None:
            self._writer.join(LAST_SECONDS - KILL_SECONDS)
            with self._starting:
                self._is_closing = True
                if self._process is not None:
                    self._process.kill()
            self._writer.join(KILL_SECONDS)

    # ------------------------------------------------------------ on the writer's thread

    def _finish(self, at: "_Recording") -> None:
        try:
            said = self._written(at)
        except Exception as error:  # noqa: BLE001  an error must not end the thread without an outcome
            said = self._failed(at, _LEFT if self._is_closing else first_line(error))
        finally:
            shutil.rmtree(at.work, ignore_errors=True)
        if said.problem:
            log.error("no profile of steps %s to %s: %s", at.first, at.last, said.problem)
        else:
            log.info("profile of steps %s to %s: %s", at.first, at.last, said.file)
        self._tell(said)

    def _written(self, at: "_Recording") -> m.ProfileWritten:
        suffix = "zip" if any(at.work.iterdir()) else "trace.json.gz"
        name = f"rank-{self._rank}.steps-{at.first}-{at.last}.{suffix}"
        check_space(at.work)
        begun = time.perf_counter()
        at.recorder.write(at.work / TRACE)
        at.loop_seconds += time.perf_counter() - begun  # torch holds the interpreter lock, so the loop waits
        made = self._compressed(at.work, name)
        if made.problem:
            return self._failed(at, made.problem)
        rename(at.work / name, self._folder / name)
        self._prune()
        lacks = "; ".join(filter(None, [at.recorder.lacks, at.lacks, made.lacks]))
        return m.ProfileWritten(
            run=self._run, rank=self._rank, seq=at.plan.seq, first_step=at.first, last_step=at.last, file=name,
            size_bytes=made.size_bytes, digest=made.digest, phases=made.phases, loop_seconds=at.loop_seconds,
            lacks=lacks,
        )  # fmt: skip

    def _compressed(self, work: Path, name: str) -> Written:
        argv = [sys.executable, "-m", "trainctl.trainer.profiling.trace_process", str(work), name]
        with self._starting:
            if self._is_closing:
                raise CannotProfileError(_LEFT)
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        with self._process as process:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            text, _ = process.communicate()
        if process.returncode:
            raise OSError(f"the process that compresses the trace ended with status {process.returncode}")
        return msgspec.json.decode(text, type=Written)

    def _prune(self) -> None:
        """A trace that can't be removed stays."""
        kept = sorted(self._folder.glob(f"rank-{self._rank}.steps-*"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-TRACES_KEPT]:
            with contextlib.suppress(OSError):
                path.unlink()

    def _failed(self, at: "_Recording", problem: str) -> m.ProfileWritten:
        return m.ProfileWritten(run=self._run, rank=self._rank, seq=at.plan.seq, problem=problem)

    def _tell(self, said: m.ProfileWritten) -> None:
        self._newest, self._repeats = said, REPEATS
        self._send(said)


class _Recording:
    """The steps of one plan."""

    def __init__(self, recorder: Recorder, plan: m.StepPlan, work: Path) -> None:
        self.recorder, self.plan, self.work = recorder, plan, work
        self.first = self.last = 0
        self.loop_seconds, self.lacks = 0.0, ""
        self.is_warm, self.recorded = False, 0
        self._since, self._resident_bytes = 0.0, 0

    def count(self, step: int) -> None:
        """A step has ended; the first one has warmed up."""
        if not self.is_warm:
            self.is_warm, self._since, self._resident_bytes = True, time.monotonic(), resident_bytes()
            return
        self.first = self.first or step
        self.last, self.recorded = step, self.recorded + 1

    def end_early(self, why: str) -> None:
        """Say which steps are missing."""
        self.lacks = f"{self.recorded} of {self.plan.profile_steps} steps: recording {why}"

    @property
    def is_over(self) -> bool:
        """Whether all steps are recorded, or it has taken too long or too much memory."""
        if not self.recorded or self.recorded == self.plan.profile_steps:
            return bool(self.recorded)
        if time.monotonic() - self._since >= MOST_SECONDS:
            self.end_early(f"ends after {MOST_SECONDS:.0f} s")
        elif resident_bytes() - self._resident_bytes >= MOST_GROWTH_BYTES:
            self.end_early(f"ends when memory has grown by {MOST_GROWTH_BYTES / 1e9:.1f} GB")
        return bool(self.lacks)


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def check_space(folder: Path) -> None:
    """Raises CannotProfileError if the disk has too little free space for a trace."""
    free = shutil.disk_usage(folder).free
    if free < LEAST_FREE_BYTES:
        need = f"a profile needs {LEAST_FREE_BYTES / 1e9:.0f} GB"
        raise CannotProfileError(f"{free / 1e9:.1f} GB are free on the disk of {folder.parent}, and {need}: free some")


def make_recorder(backend: Backend, steps: int, folder: Path) -> Recorder:
    """What the backend's library can record; `folder` gets captures."""
    if backend.name == "torch":
        from trainctl.trainer.profiling.torch_recorder import TorchRecorder

        return TorchRecorder(backend.device, steps)
    if backend.device.startswith("gpu"):
        return _on_gpu(folder)
    from trainctl.trainer.profiling.phase_recorder import PhaseRecorder

    return PhaseRecorder()


def _on_gpu(folder: Path) -> Recorder:
    import mlx.core as mx

    from trainctl.trainer.profiling.metal_recorder import MetalRecorder
    from trainctl.trainer.profiling.phase_recorder import PhaseRecorder

    return MetalRecorder(mx.metal, folder) if mx.metal.is_available() else PhaseRecorder()
