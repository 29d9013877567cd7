"""When an agent whose node drains may exit."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainctl.node_agent.roles import own_drain
from trainctl.node_agent.roles import role as transitions
from trainctl.node_agent.roles.own_drain import NodeDrain
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.trainers.rank_ports import Ending
from trainctl.protocol.record.checkpoints import COPYING


def drain(*, ended: bool = True, reported: bool = True, in_group: bool = False) -> tuple[NodeDrain, AgentRole]:
    """Of a node that follows a run."""
    ending = Ending(clean=True, why="exited") if ended else None
    followed: Any = SimpleNamespace(ending=ending, told_ending=reported, is_in_group=in_group)
    role = AgentRole()
    role.turn(transitions.follow(role.now, followed))
    return NodeDrain(role, 15.0, Path("no-runs")), role


def test_a_follower_has_left_when_its_lead_knows_that_its_trainer_ended():
    assert drain()[0].has_left
    assert not drain(ended=False)[0].has_left
    assert not drain(reported=False)[0].has_left


def test_one_whose_run_ends_as_a_whole_records_that_first(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(own_drain.time, "monotonic", lambda: now)
    waits, _ = drain(in_group=True)
    assert not waits.has_left
    now += own_drain.RUN_END_SECONDS - 1.0
    assert not waits.has_left
    now += 2.0  # its lead is gone
    assert waits.has_left
    ends, role = drain(in_group=True)
    assert not ends.has_left
    role.turn(transitions.let_go(role.now))
    assert ends.has_left


@pytest.fixture
def copier(tmp_path: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that copies a checkpoint of a run of this node."""
    (tmp_path / "run-1" / "checkpoints").mkdir(parents=True)
    with subprocess.Popen(["sleep", "1000"]) as process:
        (tmp_path / "run-1" / "checkpoints" / COPYING).write_text(f"{process.pid} 7")
        yield process
        process.kill()


async def test_an_agent_stays_while_a_checkpoint_is_copied(tmp_path: Path, copier: "subprocess.Popen[bytes]") -> None:
    leaving = NodeDrain(AgentRole(), 600.0, tmp_path)
    leaving.begin("a test", exits=True)
    serving = asyncio.create_task(leaving.serve())
    done, _ = await asyncio.wait([serving], timeout=3 * own_drain.FAREWELL_SECONDS)
    assert not done, "the machine may end with the agent, and the copy with the machine"
    copier.kill()
    copier.wait()
    await asyncio.wait_for(serving, 60)


async def test_a_copy_that_takes_longer_than_the_grace_makes_no_failure(tmp_path, copier, caplog):
    leaving = NodeDrain(AgentRole(), 0.2, tmp_path)
    leaving.begin("a test", exits=True)
    await asyncio.wait_for(leaving.serve(), 60)
    assert copier.poll() is None
    assert "still being copied after the grace of 0.2 s" in caplog.text
