"""Requests and their ends: asked again while their time lasts, without an event loop, and who is followed."""

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.tui.support.guests import view_of
from tests.tui.support.scripted import scripted
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client import client as c
from trainctl.protocol.client.blocking import BlockingClient
from trainctl.protocol.client.cluster import attach_cluster
from trainctl.protocol.errors import ClosedError, InvalidInputError, NotConnectedError, RefusedError, UnreachableError
from trainctl.protocol.messages import Snapshot, SnapshotRequest
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


async def test_a_request_follows_an_agent_that_names_the_lead_once() -> None:
    runs: m.Runs = examples.EXAMPLES["agent to client"]["runs"]
    with scripted(lambda _: [runs]) as lead:
        elsewhere = m.Refusal(rid="", code="not-lead", text="mbp leads it", lead=lead.address)
        with scripted(lambda _: [elsewhere]) as asked, scripted(lambda _: [to_itself]) as lost:
            to_itself = msgspec.structs.replace(elsewhere, lead=asked.address)
            async with c.Client(asked.address) as client:
                assert (await client.ask(m.RunsRequest)).runs == runs.runs
            async with c.Client(lost.address) as client:
                with pytest.raises(RefusedError, match="mbp leads it"):
                    await client.ask(m.RunsRequest)


IN_A_NOTEBOOK = """
from trainctl.protocol.client import BlockingClient
from trainctl.protocol.messages import SnapshotRequest
client = BlockingClient({address!r}).connect()
attached = client.attach(0)
print(client.ask(SnapshotRequest, 0).node.node, next(item.boot for item in attached if hasattr(item, "boot")))
client.close()
"""


def test_it_works_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    manager = pytest.importorskip("jupyter_client").KernelManager()
    said: list[str] = []

    def hear(message: dict[str, Any]) -> None:
        said.extend(message["content"].get("text", "") or message["content"].get("traceback", ()))

    with scripted(lambda _: [agent.snapshot()]) as agent:
        manager.start_kernel()
        kernel = manager.blocking_client()
        try:
            kernel.start_channels()
            kernel.wait_for_ready(timeout=HANG_SECONDS)
            code = IN_A_NOTEBOOK.format(address=agent.address)
            reply = kernel.execute_interactive(code, timeout=HANG_SECONDS, output_hook=hear)
        finally:
            kernel.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()
        snapshot = agent.snapshot()
        assert reply["content"]["status"] == "ok", said
        assert "".join(said).split() == [snapshot.node.node, snapshot.boot]


async def test_it_works_in_a_thread_whose_event_loop_runs() -> None:
    with scripted(lambda _: [agent.snapshot()]) as agent:
        client = BlockingClient(agent.address).connect()
        assert client.ask(SnapshotRequest, 0).node.node
        with contextlib.closing(client.attach(0)) as items:
            assert next(item for item in items if isinstance(item, Snapshot)).boot == client.ask(SnapshotRequest).boot
        client.close()


async def test_a_client_that_is_not_connected_says_so_and_can_be_closed_and_connected_again(agent: Agent) -> None:
    async def closed(client: c.Client) -> None:
        for use in (lambda: client.ask(SnapshotRequest), lambda: client.send("pause", {})):
            with pytest.raises(ClosedError, match=r"connect\(\) first"):
                await use()

    client = c.Client(agent[0])
    await closed(client)
    await client.close()
    assert await client.connect() is client
    context = client._context
    assert (await client.connect())._context is context
    await client.close()
    await client.close()
    await closed(client)


def test_a_blocking_client_that_is_not_connected_says_so_and_is_connected_once() -> None:
    before = threading.enumerate()
    with scripted(lambda _: [agent.snapshot()]) as agent:
        client = BlockingClient(agent.address)
        for _ in range(2):
            for use in (
                lambda: client.ask(SnapshotRequest),
                lambda: client.send("pause", {}),
                lambda: [*client.attach()],
            ):
                with pytest.raises(ClosedError, match=r"connect\(\) first"):
                    use()
            client.close()
            client.connect().connect()
            assert sum(thread.name == "trainctl-client" for thread in threading.enumerate()) == 1
            attached = client.attach(0)
            next(attached)
            client.close()
            attached.close()
    assert threading.enumerate() == before


def test_nothing_is_left_of_a_client_that_closed_or_could_not_connect() -> None:
    before = threading.enumerate()
    with pytest.raises(NotConnectedError), BlockingClient("tcp://127.0.0.1:1", timeout_seconds=0.2) as client:
        client.ask(SnapshotRequest)
    with pytest.raises(InvalidInputError, match=r"192\.0\.2\.1"):
        BlockingClient("tcp://192.0.2.1:1").connect()  # elsewhere, and its key isn't known
    assert threading.enumerate() == before


SHOWN: dict[str, Any] = examples.EXAMPLES["published by an agent"]
HOSTED, READING = SHOWN["run-view"], SHOWN["host-reading"]
GUEST = msgspec.structs.replace(view_of(HOSTED), run="notebook-1", lead="mbp")


async def test_a_guest_on_another_node_does_not_make_that_node_the_conducting_one() -> None:
    with (
        scripted(lambda _: [other.snapshot(node=msgspec.structs.replace(other.snapshot().node, node="mbp"))]) as other,
        scripted(lambda _: [asked.snapshot(peers=(peer,))]) as asked,
    ):
        peer = m.PeerView("mbp", other.address, other.live_address, "connected", 0.0)
        snapshots: list[str] = []
        async with (
            asyncio.timeout(HANG_SECONDS),
            contextlib.aclosing(attach_cluster(asked.address, 0)) as items,
        ):
            async for node, item in items:
                snapshots += [node] if isinstance(item, m.Snapshot) else []
                if isinstance(item, m.NodeView) and node == "mbp":
                    other.publish(GUEST)
                    other.publish(msgspec.structs.replace(READING, node="mbp"))
                if isinstance(item, m.HostReading) and item.seq == 2:
                    other.publish(msgspec.structs.replace(HOSTED, lead="mbp"))
                if isinstance(item, m.Snapshot) and node == "mbp":
                    break
        assert snapshots == ["studio", "mbp"], "the hosted run there did, and what came before it did not"
        assert other.seq == 3
