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

from trainctl.protocol import messages as m
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.common import atomic_folder
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.profiling.recorder import CannotProfileError, Recorder
from trainctl.trainer.profiling.trace_process import TRACE, Written

MOST_SECONDS = 120.0
"""Seconds after which recording ends with the step in progress: memory holds all events until then."""
TRACES_KEPT = 8
"""Newest traces of a rank that are kept; older ones are removed."""
REPEATS = 20
"""Heartbeats that repeat the outcome, for an agent that was away."""
LAST_SECONDS = 10.0
"""Seconds that a leaving trainer waits for its trace to be written."""
NICENESS = 10
"""Niceness of the process that compresses the trace: a tenth of what a training thread gets of a busy core."""

Range = Callable[[str], AbstractContextManager[object]]


class Profiler:
    """`arm`, `step`, `step_ended` and `close` are for the main thread, `state` for the control thread."""

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
        self._newest: m.ProfileWritten | None = None
        self._repeats = 0

    def arm(self, plan: m.StepPlan) -> str | None:
        """Record `plan.profile_steps` steps after the next one; or the reason why not."""
        if self._recording is not None or (self._writer is not None and self._writer.is_alive()):
            return "a profile of this rank is in progress: wait for its event, then send the command again"
        begun = time.perf_counter()
        try:
            work = self._folder / f".rank-{self._rank}.{os.getpid()}.part"
            atomic_folder.remove_parts(self._folder)
            work.mkdir(parents=True, exist_ok=True)
            recorder = make_recorder(self._backend, plan.profile_steps, work)
            recorder.start()
        except (CannotProfileError, OSError) as error:
            return first_line(error)
        self._recording = _Recording(recorder, plan, work)
        self._recording.loop_seconds = time.perf_counter() - begun
        self._show(recorder.range)
        return None

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
        at.recorder.step_ended()
        at.count(step)
        if at.is_over:
            at.recorder.stop()
            self._show(None)
            self._recording = None
            at.loop_seconds += time.perf_counter() - begun
            self._writer = threading.Thread(target=self._finish, args=(at,), name="profile", daemon=True)
            self._writer.start()
        else:
            at.loop_seconds += time.perf_counter() - begun

    def state(self) -> m.ProfileWritten | None:
        """What a heartbeat repeats."""
        self._repeats -= 1
        return self._newest if self._repeats >= 0 else None

    def close(self) -> None:
        """Wait a while for the trace to be written; a recording in progress is given up."""
        at, self._recording = self._recording, None
        if at is not None:
            at.recorder.stop()
            self._show(None)
            shutil.rmtree(at.work, ignore_errors=True)
            self._tell(self._failed(at, "the rank left before all steps were recorded"))
        if self._writer is not None:
            self._writer.join(LAST_SECONDS)
            if self._writer.is_alive() and self._process is not None:
                self._process.kill()
                self._writer.join(LAST_SECONDS)

    # ------------------------------------------------------------ on the writer's thread

    def _finish(self, at: "_Recording") -> None:
        try:
            said = self._written(at)
        except Exception as error:  # noqa: BLE001  an error must not end the thread without an outcome
            said = self._failed(at, first_line(error))
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
        at.recorder.write(at.work / TRACE)
        made = self._compressed(at.work, name)
        if made.problem:
            return self._failed(at, made.problem)
        (at.work / name).replace(self._folder / name)
        self._prune()
        lacks = "; ".join(filter(None, [at.recorder.lacks, at.lacks, made.lacks]))
        return m.ProfileWritten(
            run=self._run, rank=self._rank, seq=at.plan.seq, first_step=at.first, last_step=at.last, file=name,
            size_bytes=made.size_bytes, digest=made.digest, phases=made.phases, loop_seconds=at.loop_seconds,
            lacks=lacks,
        )  # fmt: skip

    def _compressed(self, work: Path, name: str) -> Written:
        argv = [sys.executable, "-m", "trainctl.trainer.profiling.trace_process", str(work), name]
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
        self._is_warm, self._recorded, self._since = False, 0, 0.0

    def count(self, step: int) -> None:
        """A step has ended; the first one has warmed up."""
        if not self._is_warm:
            self._is_warm, self._since = True, time.monotonic()
            return
        self.first = self.first or step
        self.last, self._recorded = step, self._recorded + 1

    @property
    def is_over(self) -> bool:
        """Whether all steps are recorded, or it has taken too long."""
        if not self._recorded or self._recorded == self.plan.profile_steps:
            return bool(self._recorded)
        if time.monotonic() - self._since < MOST_SECONDS:
            return False
        self.lacks = f"{self._recorded} of {self.plan.profile_steps} steps: recording ends after {MOST_SECONDS:.0f} s"
        return True


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
