"""A request that only asks is asked again when the line lost it or its answer, as long as its time lasts."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import pytest
import zmq
import zmq.asyncio
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.client import client as c
from trainctl.protocol.errors import UnreachableError
from trainctl.protocol.wire import codec

Agent = tuple[str, zmq.asyncio.Socket]


@pytest.fixture
async def agent(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Agent]:
    """The address and the socket of an agent; a client asks it again after a tenth of a second."""
    monkeypatch.setattr(c, "AGAIN_SECONDS", 0.1)
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.ROUTER)
    yield f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}", socket
    context.destroy(linger=0)


@pytest.mark.parametrize(("lost", "answered"), [(0, True), (2, True), (1000, False)])
async def test_asked_again_until_it_is_answered_or_its_time_is_up(agent: Agent, lost: int, answered: bool) -> None:
    address, socket = agent

    async def lose_and_answer() -> None:
        for number in itertools.count():
            identity, frame = await socket.recv_multipart()
            if number >= lost:
                rid = codec.decode_control(frame).rid
                await socket.send_multipart([identity, codec.encode(m.Runs(rid=rid, runs=()))])

    answering = asyncio.create_task(lose_and_answer())
    async with c.Client(address, timeout_seconds=HANG_SECONDS if answered else 0.5) as client:
        if answered:
            assert (await client.ask(m.RunsRequest)).runs == ()
        else:
            with pytest.raises(UnreachableError, match=r"within 0\.5 s"):
                await client.ask(m.RunsRequest)
    answering.cancel()


async def test_the_end_of_a_command_is_asked_for_again_if_its_reply_was_lost(agent: Agent) -> None:
    """As by a line that broke meanwhile; the time for a first reply may be long."""
    address, socket = agent

    async def answer() -> None:
        for state in ("accepted", "accepted", "applied"):
            identity, frame = await socket.recv_multipart()
            command = codec.decode_control(frame)
            reply = m.CommandReply(rid=command.rid, id=command.id, state=state, step=3)
            await socket.send_multipart([identity, codec.encode(reply)])

    answering = asyncio.create_task(answer())
    async with c.Client(address, timeout_seconds=HANG_SECONDS) as client, asyncio.timeout(HANG_SECONDS / 2):
        reply = await client.send("pause", {}, timeout_seconds=HANG_SECONDS)
    assert (reply.state, reply.step) == ("applied", 3)
    await answering


async def test_a_client_whose_close_is_cancelled_leaves_no_socket_and_no_context(agent: Agent) -> None:
    """A context that is collected with an open socket would wait for it for good."""
    client = await c.Client(agent[0]).connect()
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert client._socket.closed
    assert client._context.closed
