"""A rank of another node's run: what it obeys of its lead's orders."""

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import plan
from tests.node_agent.support.simulation import config

from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.trainers.rank_ports import Look
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths


class Port:
    """A trainer that takes every order."""

    def __init__(self) -> None:
        self.orders: list[m.ToTrainer] = []

    async def tell(self, order: m.ToTrainer) -> bool:
        self.orders.append(order)
        return True

    def look(self) -> Look:
        return Look()


@pytest.mark.parametrize(("recorded", "is_obeyed"), [(True, True), (False, False), (None, False)])
def test_a_late_word_on_the_lead_s_record_is_no_order_of_a_replaced_lead(tmp_path, recorded, is_obeyed):
    """It is dropped; the trainer has given up waiting for it."""
    paths, port = RunPaths(tmp_path / "run-1"), Port()
    paths.directory.mkdir()
    with RunDb(paths, resumable=False) as recorder:
        context: Any = SimpleNamespace(
            node="b", supervisor=SimpleNamespace(is_simulated=False), rank=lambda paths, rank: port
        )
        followed = FollowedRank(context, FollowedRun("run-1", 1, "a", "x:1"), config(), paths, recorder)
        followed.see(m.Generation(1, 3))
        late = msgspec.structs.replace(plan(7, m.Generation(1, 2)), kind="checkpoint", recorded=recorded)
        assert asyncio.run(followed.obey(late)) is is_obeyed
    assert port.orders == []
