"""Whether this node hosts a rank for another one: not while it has a run of its own, or is about to."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.roles import role as transitions
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import preflight
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file

ORDER = m.PeerHost(
    link="l", seq=1, run="run-1", rank=1, config=run_file.to_dict(config(nodes={"a": {}, "b": {}})),
    generation=m.Generation(1, 0),
)  # fmt: skip


@pytest.mark.parametrize("run", [None, "run-0"])
async def test_not_while_a_run_is_being_started(run: str | None) -> None:
    context: Any = SimpleNamespace(node="a", db=None)
    role = AgentRole()
    role.turn(transitions.start(role.now, run))
    field, problem = await RankHosting(context, role).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", f"leads {run or 'a run that is starting'}; one run at a time")


async def test_nor_if_one_is_started_while_the_rank_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    context: Any = SimpleNamespace(node="a", db=None, placement=None)
    role, loop = AgentRole(), asyncio.get_running_loop()

    def check(*_: object, **__: object) -> None:
        """An operator is quicker."""
        start = transitions.start(role.now)
        loop.call_soon_threadsafe(role.turn, start)

    monkeypatch.setattr(preflight, "check_on", check)
    field, problem = await RankHosting(context, role).host("b", "tcp://127.0.0.1:1", ORDER)
    assert (field, problem) == ("run", "leads a run that is starting; one run at a time")
