"""When an agent whose node drains may exit."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from trainctl.node_agent.roles import drains
from trainctl.node_agent.roles.drains import NodeDrain
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.trainers.rank_ports import Ending


def drain(*, ended: bool = True, reported: bool = True, in_group: bool = False) -> tuple[NodeDrain, AgentRole]:
    """Of a node that follows a run."""
    ending = Ending(clean=True, why="exited") if ended else None
    followed: Any = SimpleNamespace(ending=ending, told_ending=reported, is_in_group=in_group)
    role = AgentRole()
    role.follow(followed)
    return NodeDrain(role, 15.0, lambda: False), role


def test_a_follower_has_left_when_its_lead_knows_that_its_trainer_ended():
    assert drain()[0].has_left
    assert not drain(ended=False)[0].has_left
    assert not drain(reported=False)[0].has_left


def test_one_whose_run_ends_as_a_whole_records_that_first(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(drains.time, "monotonic", lambda: now)
    waits, _ = drain(in_group=True)
    assert not waits.has_left
    now += drains.RUN_END_SECONDS - 1.0
    assert not waits.has_left
    now += 2.0  # its lead is gone
    assert waits.has_left
    ends, role = drain(in_group=True)
    assert not ends.has_left
    role.let_go()
    assert ends.has_left


async def test_an_agent_stays_while_a_checkpoint_is_copied() -> None:
    is_copying = True
    leaving = NodeDrain(AgentRole(), 600.0, lambda: is_copying)
    leaving.begin("a test", exits=True)
    serving = asyncio.create_task(leaving.serve())
    done, _ = await asyncio.wait([serving], timeout=3 * drains.FAREWELL_SECONDS)
    assert not done, "the machine may end with the agent, and the copy with the machine"
    is_copying = False
    await asyncio.wait_for(serving, 60)


async def test_a_copy_that_takes_longer_than_the_grace_makes_no_failure(caplog):
    leaving = NodeDrain(AgentRole(), 0.2, lambda: True)
    leaving.begin("a test", exits=True)
    await asyncio.wait_for(leaving.serve(), 60)
    assert "still being copied after the grace of 0.2 s" in caplog.text
