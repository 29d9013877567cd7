"""The checkpoints of this node that are due to be copied elsewhere, and the processes that copy them.

A trainer leaves a mark beside a checkpoint before it writes it. The mark goes once the checkpoint, or a newer one, is
copied, so what is left to be copied outlives trainers and agents. A process that copies outlives its agent too; that of
the next agent waits for it.
"""

import asyncio
import contextlib
import logging
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Final

import msgspec

from trainctl.node_agent.copies.copy_process import CopyLine, newest_checkpoint, step_of
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import CheckpointCopy
from trainctl.protocol.record.checkpoints import PENDING, clear_pending, pending_ranks
from trainctl.protocol.record.paths import RunPaths

LOOK_SECONDS: Final = 1.0
"""Time between two looks for marks, beside those when a checkpoint is complete."""
_log: Final = logging.getLogger(__name__)


class CheckpointCopies:
    """Copies what is due, of each run in a process of its own, with one outcome for each checkpoint."""

    def __init__(self, runs: Path, report: Callable[[CheckpointCopy], Awaitable[bool]]) -> None:
        """`report` takes outcomes to the run's lead; False if the run is over."""
        self._runs, self._report = runs, report
        self._tasks: dict[Path, asyncio.Task[None]] = {}  # by run directory
        self._failed: dict[Path, int] = {}  # step of the newest that couldn't be copied: a newer one is tried again
        self._look = asyncio.Event()

    def look(self) -> None:
        """Look for marks at once: a checkpoint is complete."""
        self._look.set()

    @property
    def is_busy(self) -> bool:
        """Return whether something is being copied, or is due, or can't be looked for."""
        try:
            return bool(self._tasks) or bool(self._due())
        except OSError:
            return True

    async def serve(self) -> None:
        """Copy, until cancelled; the processes then continue by themselves."""
        try:
            while True:
                self._look.clear()
                with contextlib.suppress(OSError):  # no descriptor is free: at the next look
                    for directory, step in (await asyncio.to_thread(self._due)).items():
                        task = self._tasks[directory] = asyncio.create_task(self._copy(directory, step))
                        task.add_done_callback(partial(self._ended, directory))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS):  # wait_for of Python 3.11 may swallow a cancellation
                        await self._look.wait()
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _ended(self, directory: Path, task: asyncio.Task[None]) -> None:
        del self._tasks[directory]
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("a checkpoint of %s can't be copied", directory.name, exc_info=error)

    def _due(self) -> dict[Path, int]:
        """Return the step of the newest complete checkpoint of each run that has a mark for it or an older one."""
        due = {}
        for folder in {mark.parent for mark in self._runs.glob(f"*/checkpoints/{PENDING}.*")}:
            newest, directory = newest_checkpoint(folder), folder.parent
            if newest is None or directory in self._tasks or self._failed.get(directory) == step_of(newest):
                continue
            if any(marked <= step_of(newest) for marked in pending_ranks(folder)):
                due[directory] = step_of(newest)
        return due

    async def _copy(self, directory: Path, step: int) -> None:
        folder, target = directory / "checkpoints", ""
        rank = next(iter(pending_ranks(folder).values()), 0)
        try:
            target = run_file.read(RunPaths(directory).run_file).checkpoint.copy_to
            if not target:  # a resume has removed it
                clear_pending(folder, step)
                return
            last, problem = await self._follow(directory, target, rank)
        except (TrainctlError, OSError) as error:
            last, problem = None, str(error)
        if problem:
            newest = newest_checkpoint(folder)
            step = step_of(newest) if newest is not None else step
            step = last.step if last is not None and last.state == "copying" else step
            if last is None or (last.state, last.step) not in (("failed", step), ("copied", step)):
                await self._pass_on(directory, target, rank, CopyLine(step, "failed", problem=problem))

    async def _follow(self, directory: Path, target: str, rank: int) -> tuple[CopyLine | None, str]:
        """Return the last line of the process, and why it failed if it did."""
        words = [sys.executable, "-m", "trainctl.node_agent.copies.copy_process", str(directory), target]
        process = subprocess.Popen(  # noqa: ASYNC220  asyncio's would end with its loop
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, start_new_session=True
        )
        reader, last = asyncio.StreamReader(), None
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, process.stdout)
        async for text in reader:
            with contextlib.suppress(msgspec.MsgspecError):  # a line that its end has cut off
                last = msgspec.json.decode(text, type=CopyLine)
                await self._pass_on(directory, target, rank, last)
        status = await asyncio.to_thread(process.wait)
        if status < 0:
            return last, f"the process that copies was ended by {signal.Signals(-status).name}"
        return last, f"the process that copies exited with {status}; the agent's standard error has more" * bool(status)

    async def _pass_on(self, directory: Path, target: str, rank: int, line: CopyLine) -> None:
        message = CheckpointCopy(run=directory.name, rank=rank, to=target, **msgspec.structs.asdict(line))
        is_heard = await self._report(message)
        if line.state == "copied":
            clear_pending(directory / "checkpoints", line.step)
        elif line.state == "failed":
            self._failed[directory] = line.step
            _log.error("checkpoint of step %s not copied to %s: %s", f"{line.step:,}", target, line.problem)
        if line.state == "copied" and not is_heard:
            _log.info("checkpoint of step %s of %s copied to %s", f"{line.step:,}", directory.name, target)
