"""What the lead sends other agents to have a run hosted, and how it passes on that one of them refuses."""

import msgspec
import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import ModelTable
from trainctl.protocol.errors import InvalidInputError


class EarlierAgent:
    """A link to an agent whose run files have no `model.attention`."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def host(self, order: m.PeerHost, seconds: float) -> m.PeerHosted:
        problem = "unknown field" if "attention" in order.config["model"] else ""
        field = "config: model.attention" if problem else ""
        return m.PeerHosted("l", 1, order.run, order.rank, field, problem)

    async def end_rank(self, run: str, rank: int, state: m.RunState, reason: str) -> None:
        self.ended.append(reason)


async def host(link: EarlierAgent, model: ModelTable) -> None:
    made = msgspec.structs.replace(config(nodes={"a": {}, "b": {}}), model=model)
    peers = Peers(None, {}, None, None)  # type: ignore[arg-type]  # it has no links of its own
    links: dict[str, PeerLink] = {"b": link}  # type: ignore[dict-item]
    peers.links = links
    await peers.host("run-1", {1: "b"}, made, m.Generation(1, 0), lambda node: None, call_off="failed")


async def test_an_earlier_version_hosts_a_run_without_newer_settings_and_refuses_others_by_name() -> None:
    link, model = EarlierAgent(), run_file.parse(RAW).model
    await host(link, model)
    with pytest.raises(InvalidInputError) as refused:
        await host(link, msgspec.structs.replace(model, attention="varlen"))
    assert str(refused.value) == (
        "config: model.attention: b: unknown to b's version of trainctl: upgrade b, or leave out model.attention"
    )
    assert link.ended == [str(refused.value)]


RAW = {
    "run": {"name": "r", "steps": 9}, "model": {"path": "/model"}, "data": {"path": "/data"}, "batch": {"global": 8},
    "optimizer": {"learning_rate": 0.1},
}  # fmt: skip
