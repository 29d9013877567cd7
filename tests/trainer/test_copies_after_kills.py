"""A copy of a checkpoint whose trainer and process are killed: the rank's next trainer completes it, and says so."""

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.trainer.support.process_agent import FIRST, Agent, settings
from tests.waiting import HANG_SECONDS, until

from trainctl.protocol import messages as m
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.copy_mark import step_in_copy
from trainctl.trainer.checkpoints import copies, copy_process
from trainctl.trainer.checkpoints.pending_copy import PendingCopy, read

pytestmark = pytest.mark.tier("all")

COPIER = ("trainctl.trainer.checkpoints.copy_process", "trainctl: checkpoint copy of r")
"""In the command line of a process that copies, before and after it has given itself a title."""


class Gate:
    """A command for copies: each run of it waits in front of a FIFO, and copies the folder once it is let through."""

    def __init__(self, place: Path) -> None:
        self.place, self._fifo = place, place / "gate"
        place.mkdir()
        os.mkfifo(self._fifo)
        script = f'read line < {self._fifo} && cp -r "$1" {place}/'
        self.command = shlex.join(["sh", "-c", script, "copy", "{folder}"])

    def let_through(self) -> None:
        self._fifo.write_text("continue\n")  # once a reader is there


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_file: Callable[..., Any]) -> Gate:
    made = Gate(tmp_path / "there")
    monkeypatch.setenv(copies.COMMAND_VARIABLE, made.command)
    run_file(**settings(tmp_path) | {"run__orphan_seconds": HANG_SECONDS}, checkpoint__copy_to="command")
    return made


def copier_of(trainer: int) -> psutil.Process:
    """The process that copies for a trainer, or waits for its turn."""
    children = psutil.Process(trainer).children
    process: psutil.Process = until(lambda: next(filter(is_copier, children()), None), what="a process that copies")
    return process


def is_copier(process: psutil.Process) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:  # it has ended
        return False
    return any(text in words for text in COPIER)


def is_at_the_lock(copier: psutil.Process) -> bool:
    return any(Path(file.path).name == copy_process.LOCK for file in copier.open_files())


def kill(process: psutil.Process) -> None:
    """With all that it has started, before it can see any of that end."""
    process.suspend()
    for one in (*process.children(recursive=True), process):
        one.kill()


def test_a_copy_that_was_killed_after_its_trainer_is_completed_by_the_next_one(agent: Agent, gate: Gate) -> None:
    """kill -9 of a trainer, and of the process that copies for it while the next trainer's waits for its turn."""
    first = agent.start()
    agent.hear(m.Ready)
    agent.form(FIRST)
    agent.step(1, 1)
    agent.step(2, 1, kind="checkpoint", writers=(0,))
    assert agent.hear(m.CheckpointCopy).state == "copying"
    held = copier_of(first.pid)
    until(held.children, what="the command")
    first.kill()
    first.wait(HANG_SECONDS)
    assert read(agent.paths.checkpoints) == PendingCopy(0, 1)

    second = agent.start("--resume-from", str(agent.paths.checkpoint(1)))
    waiting = copier_of(second.pid)
    until(lambda: is_at_the_lock(waiting), what="a turn that is waited for")
    assert step_in_copy(agent.paths.checkpoints) == 1, "the first one still copies"
    kill(held)
    copying = agent.hear(m.CheckpointCopy)
    assert (copying.state, copying.step) == ("copying", 1)
    gate.let_through()
    copied = agent.hear(m.CheckpointCopy)
    assert (copied.state, copied.step, copied.to) == ("copied", 1, "command")
    assert checkpoints.verify(gate.place / "step-1").step == 1
    until(lambda: read(agent.paths.checkpoints) is None, what="that it is noted")
    agent.leave(second)
