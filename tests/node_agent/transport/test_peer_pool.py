"""What the lead sends other agents to have a run hosted, and how it passes on that one of them refuses."""

import asyncio
from typing import Any

import msgpack
import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.node_agent.support.simulation import config
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import ModelTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.wire import sockets


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


class Lead:
    """Says hello, and hears of nothing else."""

    def hello(self, link: str) -> m.PeerHello:
        return m.PeerHello(link=link, lead="a", address="tcp://127.0.0.1:9", generation=None)

    def in_touch(self, node: str, why: str) -> None:
        """It is read from the link."""


async def test_an_agent_of_another_protocol_is_refused_in_one_line_with_both_versions() -> None:
    context: Any = zmq.asyncio.Context()
    server = sockets.new_socket(context, zmq.ROUTER)
    lead: Any = Lead()
    link = PeerLink(context, "b", f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}", lead)
    serving = asyncio.create_task(link.serve())
    try:
        async with asyncio.timeout(HANG_SECONDS):
            identity, _ = await server.recv_multipart()
            refusal = {"v": 99, "type": "refusal", "rid": "", "code": "version", "text": "protocol version 2"}
            await server.send_multipart([identity, msgpack.packb(refusal)])
            while "not reached" in link.line.why:
                await asyncio.sleep(0.01)
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)
        context.destroy(linger=0)
    assert link.line.why == "protocol version 99 is not supported; this program uses 2: upgrade the older one"


RAW = {
    "run": {"name": "r", "steps": 9}, "model": {"path": "/model"}, "data": {"path": "/data"}, "batch": {"global": 8},
    "optimizer": {"learning_rate": 0.1},
}  # fmt: skip
