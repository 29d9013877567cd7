"""Tests of which checkpoints an agent copies, when, and what the run's lead hears of it."""

import asyncio
import contextlib
import os
import resource
import sys

import psutil
import pytest
import tomli_w
from tests.trainer.support.written_checkpoints import run_directory, written
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.copies.checkpoint_copies import CheckpointCopies
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.checkpoints import COMMAND_VARIABLE, note_pending, pending_ranks


@pytest.fixture
def run(tmp_path):
    """A run directory."""
    (tmp_path / "there").mkdir()
    return run_directory(tmp_path)


def set_target(run, target):
    raw = {
        "run": {"name": "demo", "steps": 10},
        "model": {"path": "/models/small"},
        "data": {"path": "/data/a.txt"},
        "batch": {"global": 16},
        "optimizer": {"learning_rate": 0.001},
        "checkpoint": {"copy_to": target},
    }
    run.mkdir(parents=True, exist_ok=True)
    (run / "run.toml").write_bytes(tomli_w.dumps(raw).encode())


def write(run, step, rank=2):
    """As a trainer does."""
    note_pending(run / "checkpoints", rank, step)
    written(run, step)


class Agent:
    """The copies of one life of an agent, and what the lead hears of them."""

    def __init__(self, run):
        self.run, self.heard = run, []
        self.copies = CheckpointCopies(run.parent, self._hear)

    async def _hear(self, message):
        self.heard.append(message)
        return True

    @contextlib.asynccontextmanager
    async def serving(self):
        task = asyncio.create_task(self.copies.serve())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def hears(self, *outcomes):
        async with asyncio.timeout(HANG_SECONDS):
            while len(self.heard) < len(outcomes) or self.copies.is_busy:
                await asyncio.sleep(0.02)
        assert [(message.step, message.state) for message in self.heard] == [*outcomes]


async def test_a_checkpoint_is_copied_once_it_is_complete_and_the_lead_hears_of_it(run, tmp_path):
    set_target(run, str(tmp_path / "there"))
    agent = Agent(run)
    async with agent.serving():
        note_pending(run / "checkpoints", 2, 3)
        await asyncio.sleep(0.1)
        assert not agent.copies.is_busy, "it isn't complete"
        written(run, 3)
        agent.copies.look()
        await agent.hears((3, "copying"), (3, "copied"))
        write(run, 4)
        agent.copies.look()
        await agent.hears((3, "copying"), (3, "copied"), (4, "copying"), (4, "copied"))
    assert {(message.rank, message.run, message.to) for message in agent.heard} == {
        (2, "run-1", str(tmp_path / "there"))
    }
    assert pending_ranks(run / "checkpoints") == {}
    assert (tmp_path / "there" / "run-1" / "checkpoints" / "step-4" / "manifest.json").is_file()
    later = Agent(run)
    async with later.serving():
        await asyncio.sleep(0.2)
    assert not later.heard, "a copy that is complete is not made again"


async def test_what_an_agent_leaves_is_copied_by_the_next_one_also_after_the_end_of_the_run(run, tmp_path):
    """Only the newest of several checkpoints is copied, and none that has no mark."""
    set_target(run, str(tmp_path / "there"))
    written(run, 2)
    assert not Agent(run).copies.is_busy
    for step in (3, 4):
        write(run, step)
    note_pending(run / "checkpoints", 2, 9)  # it will never be complete
    agent = Agent(run)
    assert agent.copies.is_busy
    async with agent.serving():
        await agent.hears((4, "copying"), (4, "copied"))
    assert pending_ranks(run / "checkpoints") == {9: 2}


async def test_a_look_for_which_no_descriptor_is_free_is_made_again(run, tmp_path):
    set_target(run, str(tmp_path / "there"))
    agent = Agent(run)
    async with agent.serving():
        write(run, 3)
        with no_free_descriptor():
            agent.copies.look()
            await asyncio.sleep(0.1)
            assert agent.copies.is_busy, "it can't be told"
        agent.copies.look()
        await agent.hears((3, "copying"), (3, "copied"))


@contextlib.contextmanager
def no_free_descriptor():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    spare = os.dup(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (spare + 1, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        os.close(spare)


async def test_a_copy_that_outlives_its_agent_is_waited_for(run, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv(COMMAND_VARIABLE, f"sh -c 'read line < {tmp_path}/gate'")
    set_target(run, "command")
    write(run, 3)
    first, second = Agent(run), Agent(run)
    async with first.serving(), asyncio.timeout(HANG_SECONDS):
        while not first.heard:
            await asyncio.sleep(0.02)
    async with second.serving(), asyncio.timeout(HANG_SECONDS):
        await asyncio.to_thread((tmp_path / "gate").write_text, "continue\n")
        while not second.heard:
            await asyncio.sleep(0.02)
        await asyncio.to_thread((tmp_path / "gate").write_text, "continue\n")
        await second.hears((3, "copying"), (3, "copied"))
    assert [message.state for message in first.heard] == ["copying"]


async def test_a_copy_whose_process_is_killed_fails_with_the_reason_and_is_made_by_the_next_agent(
    run, tmp_path, monkeypatch
):
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv(COMMAND_VARIABLE, f"sh -c 'read line < {tmp_path}/gate'")
    set_target(run, "command")
    write(run, 3)
    before = {child.pid for child in psutil.Process().children()}
    agent = Agent(run)
    async with agent.serving(), asyncio.timeout(HANG_SECONDS):
        while not agent.heard:
            await asyncio.sleep(0.02)
        (process,) = [child for child in psutil.Process().children() if child.pid not in before]
        while not (programs := process.children()):
            await asyncio.sleep(0.02)
        for victim in (process, *programs):
            victim.kill()
        await agent.hears((3, "copying"), (3, "failed"))
        await asyncio.sleep(0.1)
        assert not agent.copies.is_busy, "it waits for the next checkpoint"
    assert agent.heard[-1].problem == "the process that copies was ended by SIGKILL"
    set_target(run, str(tmp_path / "there"))
    again = Agent(run)
    async with again.serving():
        await again.hears((3, "copying"), (3, "copied"))


def test_a_command_is_the_node_s_own(monkeypatch):
    with pytest.raises(InvalidInputError, match="this node has no command: set it with trainctl-agent install --env"):
        checkpoints.check_node("command", "run.toml")
    monkeypatch.setenv(COMMAND_VARIABLE, "no-such-program {folder}")
    with pytest.raises(InvalidInputError, match="'no-such-program' is no program on this node's PATH"):
        checkpoints.check_node("command", "run.toml")
    monkeypatch.setenv(COMMAND_VARIABLE, "cp -r {folder} '/a b'")
    checkpoints.check_node("command", "run.toml")
    assert checkpoints.own_command() == ["cp", "-r", "{folder}", "/a b"]
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(InvalidInputError, match=r"a copy to a store needs obstore; .*pip install '\.\[cloud\]'"):
        checkpoints.check_node("s3://bucket/runs", "run.toml")


async def test_an_agent_stops_that_is_told_of_a_checkpoint_at_that_moment(run):
    """asyncio.wait_for of Python 3.11 swallows a cancellation that comes with what it waits for."""
    copies = CheckpointCopies(run.parent, Agent(run)._hear)
    serving = asyncio.create_task(copies.serve())
    async with asyncio.timeout(HANG_SECONDS):
        while not copies._look._waiters:
            await asyncio.sleep(0.01)
        copies.look()
        await asyncio.sleep(0)
        serving.cancel()
        await asyncio.wait({serving})
    assert serving.cancelled()
