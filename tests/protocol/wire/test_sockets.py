"""Each trap of ZeroMQ, msgpack and asyncio, and the option or check that keeps this program out of it."""

import ast
import asyncio
import contextlib
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.asyncio
from tests.integration.support import rawzmtp
from tests.waiting import HANG_SECONDS, PATIENT_MILLISECONDS
from zmq.utils.monitor import recv_monitor_message

from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.wire import codec, sockets
from trainctl.protocol.wire.handshake import HandshakeWatch

ROOMS = [Path(__file__).parents[3] / room / "trainctl" for room in ("protocol", "trainer", "node_agent", "tui")]


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made = zmq.Context()
    yield made
    made.destroy(linger=0)


OF_KIND = {
    zmq.ROUTER: {zmq.HANDSHAKE_IVL: 1000, zmq.MAXMSGSIZE: 64 * 1024, zmq.RCVHWM: 8},
    zmq.XPUB: {zmq.HANDSHAKE_IVL: 1000, zmq.SNDHWM: 1000},
    zmq.DEALER: {zmq.HANDSHAKE_IVL: 2000, zmq.MAXMSGSIZE: 1024 * 1024, zmq.IMMEDIATE: 1},
    zmq.SUB: {zmq.HANDSHAKE_IVL: 2000, zmq.RCVHWM: 10_000, zmq.TCP_KEEPALIVE_IDLE: 2, zmq.TCP_KEEPALIVE_INTVL: 1},
}


@pytest.mark.parametrize("kind", OF_KIND)
def test_options_of_all(context, kind) -> None:
    """With heartbeats libzmq 4.3.5 would take a late subscriber's connection for dead, and abort when it is read."""
    made = sockets.new_socket(context, kind, control=kind == zmq.ROUTER)
    options = {zmq.LINGER: 0, zmq.RECONNECT_IVL: 200, zmq.RECONNECT_IVL_MAX: 5000, zmq.CONNECT_TIMEOUT: 3000}
    options |= {zmq.IDENTITY: b"", **OF_KIND[kind]}
    beats = {zmq.HEARTBEAT_IVL: 1000, zmq.HEARTBEAT_TIMEOUT: 3000, zmq.HEARTBEAT_TTL: 3000}
    options |= beats if kind == zmq.DEALER else {zmq.HEARTBEAT_IVL: 0, zmq.TCP_KEEPALIVE: 1}
    assert {name: made.getsockopt(name) for name in options} == options
    assert made.getsockopt(zmq.SNDHWM) > 0 and made.getsockopt(zmq.RCVHWM) > 0, "0 is no limit"
    assert 0 < made.getsockopt(zmq.MAXMSGSIZE) <= codec.FRAME_BYTES


def test_a_server_that_hangs_is_noticed_by_its_clients(context) -> None:
    """Its system answers for it; what it says itself does not come."""
    with socket.create_server(("127.0.0.1", 0)) as server, contextlib.ExitStack() as stack:
        client = sockets.new_socket(context, zmq.DEALER)
        events = client.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)

        def shake_hands() -> None:
            made, _ = server.accept()
            stack.push(made)
            made.sendall(rawzmtp.greeting() + rawzmtp.ready(b"ROUTER"))

        greeter = threading.Thread(target=shake_hands)
        greeter.start()
        client.connect(f"tcp://127.0.0.1:{server.getsockname()[1]}")
        greeter.join(HANG_SECONDS)
        seen = []
        while zmq.EVENT_DISCONNECTED not in seen:
            assert events.poll(PATIENT_MILLISECONDS), seen
            seen.append(recv_monitor_message(events)["event"])
        client.disable_monitor()
    assert seen == [zmq.EVENT_HANDSHAKE_SUCCEEDED, zmq.EVENT_DISCONNECTED]


def test_what_is_said_to_nobody_is_not_kept_and_a_reply_to_one_who_is_gone_is_an_error(context) -> None:
    """A command that nobody took would else be delivered, stale, to an agent that is started later."""
    client = sockets.new_socket(context, zmq.DEALER)
    client.connect("tcp://127.0.0.1:1")
    with pytest.raises(zmq.Again):
        client.send(b"command", zmq.DONTWAIT)
    with pytest.raises(zmq.ZMQError, match="Host unreachable"):
        sockets.new_socket(context, zmq.ROUTER).send_multipart([b"nobody", b"reply"], zmq.DONTWAIT)


def test_nobody_takes_over_the_replies_to_another(context) -> None:
    server = sockets.new_socket(context, zmq.ROUTER)
    address = f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}"
    first, second = (sockets.new_socket(context, zmq.DEALER) for _ in range(2))
    for one, said in ((first, b"first"), (second, b"second")):
        one.setsockopt(zmq.IDENTITY, b"the same")
        one.connect(address)
        assert one.poll(PATIENT_MILLISECONDS, zmq.POLLOUT)
        one.send(said)
    assert server.poll(PATIENT_MILLISECONDS)
    assert server.recv_multipart() == [b"the same", b"first"]
    server.send_multipart([b"the same", b"reply"])
    assert first.poll(PATIENT_MILLISECONDS) and first.recv() == b"reply"
    assert not server.poll(200) and not second.poll(0)


@pytest.mark.parametrize("receive", [sockets.receive, sockets.receive_from])
async def test_others_have_a_turn_before_each_message(receive: Any) -> None:
    """Otherwise a peer that sends faster than its messages are handled keeps the loop for itself."""
    context, turns, waiting = zmq.asyncio.Context(), 0, 500
    try:
        there, here = sockets.new_socket(context, zmq.PAIR), sockets.new_socket(context, zmq.PAIR)
        here.bind("inproc://here")
        there.connect("inproc://here")

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        for _ in range(waiting):
            await there.send(b"x")
        task = asyncio.create_task(others())
        for _ in range(waiting):
            await receive(here)
        task.cancel()
    finally:
        context.destroy(linger=0)
    assert turns >= waiting


def test_nothing_is_unpickled() -> None:
    """In no room: neither by its name, nor by torch.load of more than weights."""
    for file in [file for room in ROOMS for file in room.rglob("*.py")]:
        text = file.read_text(encoding="utf-8")
        if not re.search(r"pickle|marshal|shelve|dill|\bload\b", text):
            continue  # parsing all files takes seconds
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"pickle", "marshal", "shelve", "dill"}, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "load":
                of_torch = isinstance(node.func.value, ast.Name) and node.func.value.id == "torch"
                assert not of_torch or "weights_only" in {word.arg for word in node.keywords}, file


def test_no_two_processes_number_their_connections_alike() -> None:
    """libzmq seeds nothing: who had seen one process's numbers would know every other's."""
    program = """if True:
        import zmq
        from trainctl.protocol.wire import sockets
        context = zmq.Context()
        router, dealer = sockets.new_socket(context, zmq.ROUTER), sockets.new_socket(context, zmq.DEALER)
        dealer.connect(f"tcp://127.0.0.1:{router.bind_to_random_port('tcp://127.0.0.1')}")
        dealer.send(b"")
        print(router.recv_multipart()[0].hex())
        context.destroy(linger=0)
    """
    first, second = (subprocess.check_output([sys.executable, "-c", program], timeout=HANG_SECONDS) for _ in range(2))
    assert len(first) == len(second) == 11
    assert first != second


async def test_a_long_multipart_message_is_not_kept() -> None:
    assert sockets.check_frames([b"x"], 1) == [b"x"]
    for count in (0, 2, 3):
        with pytest.raises(ProtocolError, match=f"{count} frames, expected 1"):
            sockets.check_frames([b"x"] * count, 1)
    context = zmq.asyncio.Context()
    try:
        there, here = sockets.new_socket(context, zmq.PAIR), sockets.new_socket(context, zmq.PAIR)
        port = here.bind_to_random_port("tcp://127.0.0.1")
        there.connect(f"tcp://127.0.0.1:{port}")
        for sent, kept in ((1, 1), (8, 8), (9, 9), (500, 9)):
            await there.send_multipart([b"x"] * sent)
            await there.send_multipart([b"next"])
            assert len(await sockets.receive(here)) == kept
            assert await sockets.receive(here) == [b"next"]
    finally:
        context.destroy(linger=0)


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(sockets, "AGAIN_SECONDS", 0.01)
    cancellations = 0

    async def stubborn():
        nonlocal cancellations
        while cancellations < 3:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancellations += 1

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_SECONDS):
        await sockets.end_tasks([task])
    assert cancellations == 3


async def test_a_cancellation_while_a_connection_is_closed_is_not_lost():
    """As when an agent stops that is just about to reach another one again."""
    context = zmq.asyncio.Context()
    closed = False

    async def reach():
        nonlocal closed
        socket = context.socket(zmq.DEALER)
        watch = HandshakeWatch(socket, "tcp://127.0.0.1:1", None)
        watch.start()
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(reaching.cancel)
        try:
            await watch.close()
            closed = True
        finally:
            socket.close(linger=0)

    reaching = asyncio.create_task(reach())
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(HANG_SECONDS):
            await reaching
    assert not closed
    context.destroy(linger=0)
