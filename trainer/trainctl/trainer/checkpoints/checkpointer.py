"""The writing of checkpoints on one rank: it carries out checkpoint plans. Between two steps saver.py copies the state,
and a thread writes the copy while training continues. Messages tell the agent. Which bits: files.py."""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import (
    Checkpointed,
    CheckpointInfo,
    CheckpointProgress,
    FromTrainer,
    Generation,
    StepPlan,
)
from trainctl.protocol.record.checkpoints import note_pending, pending_ranks
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import sync_commits
from trainctl.trainer.checkpoints.saver import Copied, Saver, WriteMeter
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log
from trainctl.trainer.step.progress import Progress

CHECKPOINT_FAILURES = (OSError, MemoryError, TrainctlError)
"""Errors that cost the checkpoint, not the run."""
NICENESS = 10
"""Niceness of the thread that writes: it gets a tenth of what a training thread gets of a busy core, and all of an idle
one."""
RECORD_SECONDS = 10.0
"""Longest wait for the lead's disk. A lead that is gone for longer costs no checkpoint."""
_LOOK_SECONDS = 0.05
LAST_SECONDS = 3.0
"""Seconds that a leaving trainer waits for a copy to end; then the copy continues without it."""


class RecordSync:
    """The record that a checkpoint needs to be resumed from: on its disk before the checkpoint has its final name.
    `plan` is for the control thread, `wait` for the one that writes a checkpoint."""

    def __init__(
        self, paths: RunPaths, metrics: MetricsWriter, progress: Progress, is_away: Callable[[], bool]
    ) -> None:
        """`is_away`: whether this node's agent can't be reached."""
        self._paths, self._metrics, self._progress, self._is_away = paths, metrics, progress, is_away
        self._recorded = threading.Condition()
        self._newest: tuple[Generation, int] | None = None  # of the plans whose step the lead's disk has

    def plan(self, plan: StepPlan) -> None:
        """Take a checkpoint's plan that was sent again, since the lead's disk has its record up to that step."""
        with self._recorded:
            self._newest = plan.generation, plan.seq
            self._recorded.notify_all()

    def wait(self, plan: StepPlan | None) -> None:
        """Wait until the lead's disk has the record up to the checkpoint's step. Without an agent, or a plan that
        announces the lead's word, and where this rank leaves or the plan's generation is left, have this node's disk
        keep the record as its agent has written it, and this rank's own. Raises OSError."""
        if plan is None or plan.recorded is not False or not self._is_recorded(plan):
            sync_commits(self._paths.record)
            self._metrics.sync()

    def _is_recorded(self, plan: StepPlan) -> bool:
        until = time.monotonic() + RECORD_SECONDS
        with self._recorded:
            while self._newest is None or self._newest < (plan.generation, plan.seq):
                highest = self._progress.highest  # the lead gives its word only in the plan's generation
                is_left = bool(self._progress.leaving) or (highest is not None and highest > plan.generation)
                if is_left or self._is_away() or time.monotonic() >= until:
                    log.warning("step %s: checkpoint without the lead's word on its record", f"{plan.step:,}")
                    return False
                self._recorded.wait(_LOOK_SECONDS)
        return True


class Checkpointer:
    """`copy` and `begin` are for the main thread, `state` for the control thread. `send` takes messages to the
    agent."""

    def __init__(
        self,
        run: str,
        rank: int,
        saver: Saver,
        send: Callable[[FromTrainer], None],
        copied: Path | None = None,
        wait_for_record: Callable[[StepPlan | None], None] = lambda _: None,
    ) -> None:
        """`copied`: the run's folder of checkpoints if the agent copies them elsewhere; of a plan's writers, the first
        one marks them. If that fails to write, the conductor plans the checkpoint again, first by another.
        `wait_for_record` returns once a plan's record is on its disk, which comes before its checkpoint."""
        self._marked, self._wait_for_record = copied, wait_for_record
        self._last: int | None = None  # step of the newest checkpoint that was marked
        self._run, self._rank, self._saver, self._send = run, rank, saver, send
        self._copied: tuple[Copied, StepPlan | None] | None = None
        self._thread: threading.Thread | None = None
        self._meter: WriteMeter | None = None  # of the write in progress
        self._newest: Checkpointed | None = None
        self._is_copying = False  # the last state
        self._written: int | None = None  # version of the state in the newest complete checkpoint of this process

    def write(self, plan: StepPlan) -> CheckpointInfo:
        """Copy and write while training waits. Raises CHECKPOINT_FAILURES."""
        self.wait()
        version = self._saver.version
        self._mark(plan, plan.step)
        info = self._saver.write(partial(self._wait_for_record, plan))
        self._written = version
        return info

    def copy(self, plan: StepPlan | None) -> None:
        """Copy the state, to be written once `begin` is called. The conductor plans one at a time; after a fence it may
        not know of the one before, which is waited for. Raises CHECKPOINT_FAILURES."""
        self.wait()
        self._copied = self._saver.copy(), plan

    def begin(self) -> None:
        """Write what was copied, if anything was; returns at once."""
        if self._copied is not None:
            copied, plan = self._copied
            self._copied = self._newest = None
            self._meter = copied.meter()
            self._thread = threading.Thread(target=self._write, args=(copied, plan), name="checkpoint", daemon=True)
            self._thread.start()

    def write_last(self, step: int) -> None:
        """Write the state of `step`, the last one, without a plan, unless that is done; waits for it. A step that was
        retracted and done again has another state."""
        self.wait()
        if self._written == self._saver.version:
            return
        self._is_copying = True
        try:
            self.copy(None)
        except CHECKPOINT_FAILURES as error:
            log.error("no checkpoint of step %s: %s", f"{step:,}", first_line(error))
            return
        finally:
            self._is_copying = False
        self.begin()
        self.wait()

    def wait(self) -> None:
        """Wait for the write under way, if there is one."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def wait_for_copy(self) -> None:
        """Wait a while for the agent to copy the newest checkpoint, so that its event is in the record."""
        deadline = time.monotonic() + LAST_SECONDS
        while self._marked is not None and self._last in pending_ranks(self._marked) and time.monotonic() < deadline:
            time.sleep(0.05)

    def state(self) -> CheckpointProgress | Checkpointed | None:
        """Return what a heartbeat repeats: how far a write has come, or how the newest one ended."""
        meter = self._meter
        if meter is None:
            return self._newest
        return CheckpointProgress(
            run=self._run, rank=self._rank, step=meter.step, done_bytes=meter.done_bytes, total_bytes=meter.total_bytes
        )

    @property
    def done_bytes(self) -> int | None:
        """Bytes written by the write under way, 0 while the last state is copied; None: nothing is being written."""
        meter = self._meter
        return meter.done_bytes if meter is not None else 0 if self._is_copying else None

    def _write(self, copied: Copied, plan: StepPlan | None) -> None:
        """Write on a thread of its own, at low priority."""
        if sys.platform == "linux":  # elsewhere a thread's id may be another process's
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        step, info, problem = copied.loop.step, None, ""
        assert self._meter is not None
        try:
            self._mark(plan, step)
            info = self._saver.write_copy(copied, self._meter, partial(self._wait_for_record, plan))
        except Exception as error:  # noqa: BLE001  the agent is to know of any
            problem = f"checkpoint failed: {first_line(error)}"
            unexpected = None if isinstance(error, CHECKPOINT_FAILURES) else error
            log.error("step %s: %s", f"{step:,}", problem, exc_info=unexpected)
        else:
            self._written = copied.version
            size, seconds = f"{info.size_bytes / 1e6:,.1f}", f"{info.write_seconds:.2f}"
            log.info("checkpoint of step %s: %s MB written and read back in %s s", f"{step:,}", size, seconds)
        self._newest = Checkpointed(
            run=self._run,
            rank=self._rank,
            generation=plan.generation if plan is not None else None,
            seq=plan.seq if plan is not None else None,
            step=step,
            checkpoint=info,
            problem=problem,
        )
        self._meter = None
        self._send(self._newest)

    def _mark(self, plan: StepPlan | None, step: int) -> None:
        """Have the agent copy a checkpoint once it is complete, if that is this rank's part. A disk that refuses costs
        the copy, not the checkpoint."""
        if self._marked is not None and (plan is None or plan.writers[:1] == (self._rank,)):
            self._last = step
            try:
                note_pending(self._marked, self._rank, step)
            except OSError as error:
                log.warning("can't note that a checkpoint has to be copied: %s", first_line(error))
