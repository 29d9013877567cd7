"""A rank's checkpoint plans: a copy between two steps, written in the background, and the messages to the agent."""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.record.copy_mark import note_pending, pending_ranks
from trainctl.trainer.checkpoints.background import BackgroundWriter, WriteMeter
from trainctl.trainer.checkpoints.record_sync import RecordSync
from trainctl.trainer.checkpoints.saver import Copied, Saver
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.logs import log

CHECKPOINT_FAILURES = (OSError, MemoryError, TrainctlError)
"""Errors that cost the checkpoint, not the run."""


LAST_SECONDS = 3.0
"""Seconds that a leaving trainer waits for a copy to end; then the copy continues without it."""


class Checkpointer:
    """`copy` and `begin` are for the main thread, `state` for the control thread. `send` takes messages to the
    agent."""

    def __init__(
        self, run: str, rank: int, saver: Saver, send: Callable[[m.FromTrainer], None], copied: Path | None = None,
        record: RecordSync | None = None,
    ) -> None:  # fmt: skip
        """`copied`: the run's folder of checkpoints if the agent copies them elsewhere; of a plan's writers, the first
        one marks them. If that fails to write, the conductor plans the checkpoint again, first by another. `record` is
        what must be on its disk before a checkpoint."""
        self._marked, self._record = copied, record
        self._last: int | None = None  # step of the newest checkpoint that was marked
        self._run, self._rank, self._saver, self._send = run, rank, saver, send
        self._writer = BackgroundWriter(self._finished)
        self._copied: tuple[Copied, m.StepPlan | None] | None = None
        self._newest: m.Checkpointed | None = None
        self._is_copying = False  # the last state
        self._written: int | None = None  # version of the state in the newest complete checkpoint of this process

    def write(self, plan: m.StepPlan) -> m.CheckpointInfo:
        """Copy and write while training waits. Raises CHECKPOINT_FAILURES."""
        self._writer.wait()
        version = self._saver.version
        self._mark(plan, plan.step)
        info = self._saver.write(partial(self._sync_record, plan))
        self._written = version
        return info

    def copy(self, plan: m.StepPlan) -> None:
        """Copy the state, to be written once `begin` is called. The conductor plans one at a time; after a fence it may
        not know of the one before, which is waited for. Raises CHECKPOINT_FAILURES."""
        self._writer.wait()
        self._copied = self._saver.copy(), plan

    def begin(self) -> None:
        """Write what was copied, if anything was; returns at once."""
        if self._copied is not None:
            copied, plan = self._copied
            self._copied = None
            self._newest = None
            self._writer.start(lambda meter: self._write(copied, plan, meter), copied.meter())

    def write_last(self, step: int) -> None:
        """Write the state of `step`, the last one, without a plan, unless that is done; waits for it. A step that was
        retracted and done again has another state."""
        self._writer.wait()
        if self._written == self._saver.version:
            return
        self._is_copying = True
        try:
            self._copied = self._saver.copy(), None
        except CHECKPOINT_FAILURES as error:
            log.error("no checkpoint of step %s: %s", f"{step:,}", first_line(error))
            return
        finally:
            self._is_copying = False
        self.begin()
        self._writer.wait()

    def state(self) -> m.CheckpointProgress | m.Checkpointed | None:
        """What a heartbeat repeats: how far a write has come, or how the newest one ended."""
        meter = self._writer.meter
        if meter is None:
            return self._newest
        return m.CheckpointProgress(
            run=self._run, rank=self._rank, step=meter.step, done_bytes=meter.done_bytes, total_bytes=meter.total_bytes
        )

    @property
    def done_bytes(self) -> int | None:
        """How far the write under way has come, 0 while the last state is copied; None: nothing is being written."""
        meter = self._writer.meter
        if meter is None:
            return 0 if self._is_copying else None
        return meter.done_bytes

    def close(self) -> None:
        """Wait for the write under way."""
        self._writer.close()

    def wait_for_copy(self) -> None:
        """Wait a while for the agent to copy the newest checkpoint, so that its event is in the record."""
        deadline = time.monotonic() + LAST_SECONDS
        while self._marked is not None and self._last in pending_ranks(self._marked) and time.monotonic() < deadline:
            time.sleep(0.05)

    def _write(self, copied: Copied, plan: m.StepPlan | None, meter: WriteMeter) -> m.Checkpointed:
        """On the writer's thread."""
        step, info, problem = copied.loop.step, None, ""
        try:
            self._mark(plan, step)
            info = self._saver.write_copy(copied, meter, partial(self._sync_record, plan))
        except Exception as error:  # noqa: BLE001  an error that ended the thread would block the next copy
            problem = f"checkpoint failed: {first_line(error)}"
            unexpected = None if isinstance(error, CHECKPOINT_FAILURES) else error
            log.error("step %s: %s", f"{step:,}", problem, exc_info=unexpected)
        else:
            self._written = copied.version
            size, seconds = f"{info.size_bytes / 1e6:,.1f}", f"{info.write_seconds:.2f}"
            log.info("checkpoint of step %s: %s MB written and read back in %s s", f"{step:,}", size, seconds)
        generation, seq = (plan.generation, plan.seq) if plan is not None else (None, None)
        return m.Checkpointed(
            run=self._run, rank=self._rank, generation=generation, seq=seq, step=step, checkpoint=info, problem=problem,
        )  # fmt: skip

    def _sync_record(self, plan: m.StepPlan | None) -> None:
        if self._record is not None:
            self._record.wait(plan)

    def _mark(self, plan: m.StepPlan | None, step: int) -> None:
        """Have the agent copy a checkpoint once it is complete, if that is this rank's part. A disk that refuses costs
        the copy, not the checkpoint."""
        if self._marked is not None and (plan is None or plan.writers[:1] == (self._rank,)):
            self._last = step
            try:
                note_pending(self._marked, self._rank, step)
            except OSError as error:
                log.warning("can't note that a checkpoint has to be copied: %s", first_line(error))

    def _finished(self, outcome: m.Checkpointed) -> None:
        self._newest = outcome
        self._send(outcome)
