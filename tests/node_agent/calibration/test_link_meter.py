"""The side of a link's measurement that is asked: one connection, with the right token, and none during a run."""

import asyncio
import socket
import types

import pytest

from trainctl.node_agent.calibration import link_meter
from trainctl.node_agent.calibration.link_meter import LinkMeter
from trainctl.node_agent.roles.role import AgentRole
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError

REQUEST = m.LinkRequest(rid="r", node="b", token="7f" * 16)


def meter(role, address="tcp://127.0.0.1:7474"):
    return LinkMeter(types.SimpleNamespace(node="a", address=address), role, lambda _: None)


def test_a_node_that_is_at_work_refuses():
    async def ask(role):
        return await meter(role).reply(REQUEST)

    role = AgentRole()
    role.start("run-1")
    with pytest.raises(RefusedError, match="takes part in a run"):
        asyncio.run(ask(role))
    role = AgentRole()
    role.is_calibrating = True
    with pytest.raises(InvalidInputError, match="calibration is in progress"):
        asyncio.run(ask(role))
    with pytest.raises(InvalidInputError, match="not in the cluster file"):
        asyncio.run(meter(AgentRole()).measured("b"))


async def test_a_connection_without_the_token_gets_nothing_and_the_node_is_free_again():
    role = AgentRole()
    asked = meter(role)
    opened = await asked.reply(REQUEST)
    assert role.is_calibrating
    with pytest.raises(InvalidInputError, match="calibration is in progress"):
        await asked.reply(m.LinkRequest(rid="r", node="c", token="00" * 16))
    with socket.create_connection(("127.0.0.1", opened.port)) as connection:
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_sendall(connection, b"0" * 32)
        assert await asyncio.get_running_loop().sock_recv(connection, 1) == b""
    result = await asked.reply(REQUEST)
    assert (result.port, result.bytes_per_second) == (opened.port, None)
    assert not role.is_calibrating


async def test_the_exchange_ends_at_its_bounds(monkeypatch):
    monkeypatch.setattr(link_meter, "LINK_BYTES", 5_000_000)
    asked = meter(AgentRole())
    opened = await asked.reply(REQUEST)
    received, trip = await asyncio.to_thread(link_meter._called, "127.0.0.1", opened.port, REQUEST.token)
    assert received > 0 and trip > 0
    assert (await asked.reply(REQUEST)).bytes_per_second > 0
    assert link_meter.LINK_SECONDS <= 5 and link_meter.LINK_BYTES <= 256_000_000
