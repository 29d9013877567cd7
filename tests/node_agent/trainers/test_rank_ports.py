"""A rank that this agent hosts: how it ends, and what an agent without file descriptors makes of it."""

import asyncio
import contextlib
import errno
import os
import select
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import zmq
import zmq.asyncio
from tests.integration.support.known_run import run_file
from tests.node_agent.support.processes import ENVIRONMENT, wait_for
from tests.node_agent.support.records import plan, write_checkpoint
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.trainers import ipc, rank_ports
from trainctl.node_agent.trainers.ipc import TrainerLink
from trainctl.node_agent.trainers.rank_ports import LocalRank, Look
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.protocol import messages as m
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.protocol.wire import codec

LEAVE = rank_ports.LEAVE_SECONDS


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that have passed for the agent, which only the test adds to."""
    seconds = [1000.0]
    for module in (rank_ports, ipc):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: seconds[0]))
    return seconds


WRITING = """
import sys, time, zmq
trainer = zmq.Context().socket(zmq.DEALER)
trainer.connect(sys.argv[1])
for said in sys.argv[2:]:
    trainer.send(bytes.fromhex(said))
time.sleep(3600)
"""


def test_a_leaving_trainer_has_time_as_long_as_its_checkpoint_makes_progress(tmp_path, clock):
    (tmp_path / "run-1").mkdir()
    paths, host = RunPaths(tmp_path / "run-1"), TrainerSupervisor()
    said = [m.CheckpointProgress(run="run-1", rank=0, step=3, done_bytes=n, total_bytes=9) for n in range(5)]
    said.append(said[-1])  # stands still from here on

    async def main() -> rank_ports.LocalRank:
        context = zmq.asyncio.Context()
        link = TrainerLink(context, lambda: tmp_path)
        words = [codec.encode(each).hex() for each in said]
        host.start(paths, 0, [sys.executable, "-c", WRITING, link.endpoint, *words], ENVIRONMENT)
        port = rank_ports.LocalRank(host, link, paths, "a", 0)
        await asyncio.wait_for(link.receive(), HANG_SECONDS)
        wait_for(lambda: port.look().pid)
        assert await port.tell(m.Leave(run="run-1", reason="stopped"))
        for _ in said[1:]:
            clock[0] += LEAVE - 1
            await asyncio.wait_for(link.receive(), HANG_SECONDS)
            assert port.look().pid and host.find(paths, 0)
        link.close()
        context.destroy(linger=0)
        return port

    port = asyncio.run(main())
    clock[0] += 1
    ending = wait_for(lambda: port.look().ending)
    assert "was ended by signal 15" in ending.why


def test_how_a_trainer_ended_is_known_however_late_its_shim_writes_it(tmp_path, monkeypatch):
    (tmp_path / "run-1").mkdir()
    paths, host = RunPaths(tmp_path / "run-1"), TrainerSupervisor()
    with contextlib.ExitStack() as held:
        context = zmq.asyncio.Context()
        held.callback(context.destroy, linger=0)
        link = TrainerLink(context, lambda: tmp_path)
        held.callback(link.close)
        port = rank_ports.LocalRank(host, link, paths, "a", 0)
        for limit, how in ((HANG_SECONDS, "was ended by signal 9"), (0.5, "is gone")):
            monkeypatch.setattr(rank_ports, "SHIM_SECONDS", limit)
            host.start(paths, 0, ["sleep", "3600"], ENVIRONMENT)
            trainer = wait_for(lambda: found if (found := host.find(paths, 0)) and found.pid else None)
            port.look()
            os.kill(trainer.keeper_pid, signal.SIGSTOP)
            os.kill(trainer.pid, signal.SIGKILL)
            wait_for(lambda: host.force_overdue() or host.find(paths, 0) is None)
            assert port.look() == rank_ports.Look(), "a shim that is busy with other things is waited for"
            if limit == HANG_SECONDS:
                os.kill(trainer.keeper_pid, signal.SIGCONT)
            assert wait_for(lambda: port.look().ending).why == how
            os.kill(trainer.keeper_pid, signal.SIGCONT)
            wait_for(lambda: host.exit_status(paths, 0) is not None)


def test_before_its_first_plan_a_rank_starts_again_from_the_run_s_checkpoint_and_later_of_no_step(tmp_path):
    """Also if another agent does so; a plan that no trainer was there to take doesn't count."""
    paths, host = RunPaths(tmp_path / "run-1"), TrainerSupervisor()
    write_checkpoint(paths, 3)
    paths.run_file.write_text(run_file(tmp_path, nodes='[nodes.a]\nbackend = "torch"\n'))

    def kill_trainer(port: rank_ports.LocalRank, step: int | None = None) -> bool:
        """Return whether it began from a checkpoint. `step`: that it shows first."""
        trainer = wait_for(lambda: found if (found := host.find(paths, 0)) and found.pid else None)
        os.kill(trainer.pid, signal.SIGKILL)
        wait_for(lambda: port.look().ending)
        if step is not None:
            StatusWriter(paths.status_page(0), trainer.pid).show("data", step)
        return "--resume-from" in trainer.command

    async def main() -> tuple[list[bool], list[bool]]:
        context = zmq.asyncio.Context()
        link = TrainerLink(context, lambda: tmp_path)
        port = first = rank_ports.LocalRank(host, link, paths, "a", 0)
        port.start(paths.checkpoint(3))
        before, after = [kill_trainer(port)], []
        await port.start_again()
        await port.tell(plan(4))
        before.append(kill_trainer(port))
        await port.start_again()
        before.append(kill_trainer(port, 3))
        port = rank_ports.LocalRank(host, link, paths, "a", 0)  # the next agent's
        await port.start_again()
        before.append(kill_trainer(port, 4))
        port = rank_ports.LocalRank(host, link, paths, "a", 0)
        await port.start_again()
        after.append(kill_trainer(port))
        trainer = context.socket(zmq.DEALER)
        trainer.connect(link.endpoint)
        await trainer.send(codec.encode(m.CheckpointProgress(run="run-1", rank=0, step=3, done_bytes=1, total_bytes=9)))
        await asyncio.wait_for(link.receive(), HANG_SECONDS)
        assert await first.tell(plan(4))
        await first.start_again()
        after.append(kill_trainer(first))
        link.close()
        context.destroy(linger=0)
        return before, after

    assert asyncio.run(main()) == ([True] * 4, [False] * 2)


@pytest.fixture
def rank(tmp_path: Path) -> LocalRank:
    """One whose trainer, this process, is seen once."""
    paths = RunPaths(tmp_path)
    known = {"pid": os.getpid(), "keeper_pid": 1, "start_time": shim.start_time(os.getpid()), "started_at": 0.0}
    shim.write_record(paths.process(0), {**known, "boot_id": shim.boot_id(), "command": ["x"]})
    return LocalRank(TrainerSupervisor(), _Link(), paths, "a", 0)  # type: ignore[arg-type]


class _Link:
    def held(self, run: str, rank: int) -> None:
        return None


def none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)


def test_a_trainer_that_cannot_be_looked_at_is_as_it_was(rank, monkeypatch):
    assert rank.look() == Look(os.getpid())
    with monkeypatch.context() as patch:
        none_left(patch)
        assert rank.look() == Look(os.getpid())
        with pytest.raises(OSError, match="Too many open files"):
            shim.start_time(os.getpid())
    assert shim.start_time(2**22 + 1) is None


async def test_none_is_started_beside_one_that_cannot_be_looked_at(rank, monkeypatch):
    none_left(monkeypatch)
    with pytest.raises(RefusedError, match="Too many open files"):
        await rank.start_again()


async def test_what_arrives_while_a_socket_is_bound_again_is_received(tmp_path):
    """To bind reads the wake-up of what has come, and ZeroMQ gives no second one."""
    context = zmq.asyncio.Context()
    runtime = tmp_path / "runtime"
    runtime.mkdir(mode=0o700)
    link = TrainerLink(context, lambda: runtime)
    message = m.CheckpointProgress(run="run-1", rank=0, step=3, done_bytes=1, total_bytes=9)
    with zmq.Context() as own, own.socket(zmq.DEALER) as trainer:
        trainer.connect(link.endpoint)
        for is_bound_again in (False, True):
            receiving = asyncio.create_task(link.receive())
            await asyncio.sleep(0)
            await asyncio.sleep(0)  # it waits for the descriptor
            trainer.send(codec.encode(message))
            select.select([link.socket.FD], [], [], 10)
            if is_bound_again:
                (runtime / "trainers.sock").unlink()
                link.look_at_files()
            async with asyncio.timeout(HANG_SECONDS / 60):
                assert (await receiving) == (message, False)
    link.close()
    context.destroy(linger=0)
