"""A rank's profile: arms the recorder by a plan, records the steps that follow, and writes the trace meanwhile."""

import contextlib
import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import psutil

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.files.durable_files import rename
from trainctl.protocol.messages import PlanKind, ProfileWritten, StepPlan
from trainctl.trainer.common import atomic_folder
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.profiling.recorders import Recorder, make_recorder
from trainctl.trainer.profiling.trace_process import TRACE, Written
from trainctl.trainer.step.rank import Rank

MAX_SECONDS = 120.0
"""Seconds after which recording ends with the step in progress: memory holds all events until then."""
MAX_GROWTH_BYTES = 1_000_000_000
"""Growth of the process's resident memory, after the step that warms up, at which recording ends with the step."""
MIN_FREE_BYTES = 2_000_000_000
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


class _Recording:
    """The steps of one plan."""

    def __init__(self, recorder: Recorder, plan: StepPlan, work: Path) -> None:
        self.recorder, self.plan, self.work = recorder, plan, work
        self.first = self.last = self.recorded = 0
        self.loop_seconds, self.lacks = 0.0, ""
        self.warm_since: float | None = None
        self._warm_bytes = 0

    def count(self, step: int) -> None:
        """Count a step that has ended; the first one has warmed up."""
        if self.warm_since is None:
            self.warm_since, self._warm_bytes = time.monotonic(), resident_bytes()
            return
        self.first, self.last, self.recorded = self.first or step, step, self.recorded + 1
        if self.recorded == self.plan.profile_steps:
            return
        if time.monotonic() - self.warm_since >= MAX_SECONDS:
            self.end_early(f"ends after {MAX_SECONDS:.0f} s")
        elif resident_bytes() - self._warm_bytes >= MAX_GROWTH_BYTES:
            self.end_early(f"ends when memory has grown by {MAX_GROWTH_BYTES / 1e9:.1f} GB")

    def end_early(self, why: str) -> None:
        """Say which steps are missing."""
        self.lacks = f"{self.recorded} of {self.plan.profile_steps} steps: recording {why}"

    @property
    def is_over(self) -> bool:
        return bool(self.lacks) or self.recorded == self.plan.profile_steps


class Profiler:
    """`arm`, `before`, `step`, `step_ended` and `close` are for the main thread, `state` for the control thread. No
    error of a recorder leaves it: the profile fails, and training continues."""

    def __init__(self, rank: Rank, folder: Path) -> None:
        """`folder` gets the traces."""
        self._rank, self._folder = rank, folder
        self._recording: _Recording | None = None
        self._writer: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._is_closing = False
        self._newest: ProfileWritten | None = None
        self._repeats = 0

    def arm(self, plan: StepPlan) -> str | None:
        """Record `plan.profile_steps` steps after the next one; or return the reason why not."""
        if self._recording is not None or (self._writer is not None and self._writer.is_alive()):
            return "a profile of this rank is in progress: wait for its event, then send the command again"
        begun, work = time.perf_counter(), self._folder / f".rank-{self._rank.who.rank}.{os.getpid()}.part"
        try:
            atomic_folder.remove_parts(self._folder)
            work.mkdir(parents=True, exist_ok=True)
            _check_space(work)
            recorder = make_recorder(self._rank.backend, plan.profile_steps, work)
            recorder.start()
        except Exception as error:  # noqa: BLE001  whatever the library raises
            shutil.rmtree(work, ignore_errors=True)
            return first_line(error)
        self._recording = _Recording(recorder, plan, work)
        self._recording.loop_seconds = time.perf_counter() - begun
        self._rank.observer.ranges = recorder.range
        return None

    def before(self, kind: PlanKind) -> None:
        """End the recording before a plan that trains no step, whose events memory would hold too; before the step that
        warms up nothing is recorded yet."""
        recording = self._recording
        if recording is None or kind in ("train", "profile") or recording.warm_since is None:
            return
        if recording.recorded:
            recording.end_early(f"ended before a plan to {kind}")
            self._end(recording)
        else:
            self._give_up(recording, f"a plan to {kind} came before the first recorded step; send the command again")

    def step(self, step: int) -> AbstractContextManager[object]:
        """Return a range of a whole step, where one is recorded."""
        return self._recording.recorder.range(f"step {step}") if self._recording else contextlib.nullcontext()

    def step_ended(self, step: int) -> None:
        """Count a step that has been reported."""
        recording = self._recording
        if recording is None:
            return
        begun = time.perf_counter()
        try:
            recording.recorder.step_ended()
            recording.count(step)
        except Exception as error:  # noqa: BLE001  whatever the library raises
            self._give_up(recording, first_line(error))
            return
        recording.loop_seconds += time.perf_counter() - begun
        if recording.is_over:
            self._end(recording)

    def state(self) -> ProfileWritten | None:
        """Return what a heartbeat repeats."""
        self._repeats -= 1
        return self._newest if self._repeats >= 0 else None

    def close(self) -> None:
        """Wait a while for the trace to be written; a recording in progress is given up."""
        if self._recording is not None:
            self._give_up(self._recording, "the rank left before all steps were recorded")
        if self._writer is not None:
            self._writer.join(LAST_SECONDS - KILL_SECONDS)
            self._is_closing = True
            if self._process is not None:
                self._process.kill()
            self._writer.join(KILL_SECONDS)

    def _end(self, recording: _Recording) -> None:
        """Stop recording; the trace is written by another thread."""
        begun = time.perf_counter()
        try:
            recording.recorder.stop()
        except Exception as error:  # noqa: BLE001  whatever the library raises
            self._give_up(recording, first_line(error))
            return
        self._recording = None
        self._rank.observer.ranges = None
        recording.loop_seconds += time.perf_counter() - begun
        self._writer = threading.Thread(target=self._finish, args=(recording,), name="profile", daemon=True)
        self._writer.start()

    def _give_up(self, recording: _Recording, problem: str) -> None:
        """Stop the recorder all the same: torch ends with a segmentation fault if its profiler runs at exit."""
        self._recording = None
        self._rank.observer.ranges = None
        with contextlib.suppress(Exception):
            recording.recorder.stop()
        shutil.rmtree(recording.work, ignore_errors=True)
        log.error("no profile: %s", problem)
        self._conclude(self._failed(recording, problem))

    def _failed(self, recording: _Recording, problem: str) -> ProfileWritten:
        who = self._rank.who
        return ProfileWritten(run=who.run, rank=who.rank, seq=recording.plan.seq, problem=problem)

    def _conclude(self, outcome: ProfileWritten) -> None:
        self._newest, self._repeats = outcome, REPEATS
        self._rank.send(outcome)

    # ------------------------------------------------------------ on the writer's thread

    def _finish(self, recording: _Recording) -> None:
        try:
            outcome = self._write(recording)
        except Exception as error:  # noqa: BLE001  an error must not end the thread without an outcome
            outcome = self._failed(recording, _LEFT if self._is_closing else first_line(error))
        finally:
            shutil.rmtree(recording.work, ignore_errors=True)
        if outcome.problem:
            log.error("no profile of steps %s to %s: %s", recording.first, recording.last, outcome.problem)
        else:
            log.info("profile of steps %s to %s: %s", recording.first, recording.last, outcome.file)
        self._conclude(outcome)

    def _write(self, recording: _Recording) -> ProfileWritten:
        work, who = recording.work, self._rank.who
        suffix = "zip" if any(work.iterdir()) else "trace.json.gz"
        name = f"rank-{who.rank}.steps-{recording.first}-{recording.last}.{suffix}"
        _check_space(work)
        begun = time.perf_counter()
        recording.recorder.write(work / TRACE)
        recording.loop_seconds += time.perf_counter() - begun  # torch holds the interpreter lock, so the loop waits
        written = self._compress(work, name)
        if written.problem:
            return self._failed(recording, written.problem)
        rename(work / name, self._folder / name)
        kept = sorted(self._folder.glob(f"rank-{who.rank}.steps-*"), key=lambda path: path.stat().st_mtime)
        for path in kept[:-TRACES_KEPT]:
            with contextlib.suppress(OSError):  # it stays
                path.unlink()
        return ProfileWritten(
            run=who.run,
            rank=who.rank,
            seq=recording.plan.seq,
            first_step=recording.first,
            last_step=recording.last,
            file=name,
            size_bytes=written.size_bytes,
            digest=written.digest,
            phases=written.phases,
            loop_seconds=recording.loop_seconds,
            lacks="; ".join(filter(None, [recording.recorder.lacks, recording.lacks, written.lacks])),
        )

    def _compress(self, work: Path, name: str) -> Written:
        argv = [sys.executable, "-m", "trainctl.trainer.profiling.trace_process", str(work), name]
        if self._is_closing:
            raise TrainctlError(_LEFT)
        self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
        with self._process as process:
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
            text, _ = process.communicate()
        if process.returncode:
            raise OSError(f"the process that compresses the trace ended with status {process.returncode}")
        return msgspec.json.decode(text, type=Written)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(psutil.Process().memory_info().rss)


def _check_space(folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < MIN_FREE_BYTES:
        need = f"a profile needs {MIN_FREE_BYTES / 1e9:.0f} GB"
        raise TrainctlError(f"{free / 1e9:.1f} GB are free on the disk of {folder.parent}, and {need}: free some")
