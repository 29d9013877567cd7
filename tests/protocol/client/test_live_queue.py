"""Published messages are taken all at once, in order and in bounded room, without keeping the loop from others."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.client import live_queue
from trainctl.protocol.client.live_queue import AT_ONCE, LiveQueue
from trainctl.protocol.errors import VersionError
from trainctl.protocol.wire import codec, sockets

EVENT: Any = examples.EXAMPLES["published by an agent"]["event"]
OTHER_VERSION = msgspec.msgpack.encode({**msgspec.msgpack.decode(codec.encode(EVENT)), "v": 99})
SECONDS = HANG_SECONDS


class Publisher:
    """A socket that a queue is connected to."""

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.socket = sockets.new_socket(zmq.Context(context), zmq.XPUB)
        self.address = f"tcp://127.0.0.1:{self.socket.bind_to_random_port('tcp://127.0.0.1')}"

    def say(self, seq: int) -> None:
        self.send(codec.encode(msgspec.structs.replace(EVENT, seq=seq)))

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart([b"event", *frames])


Ends = tuple[Publisher, LiveQueue]


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    """A publisher, and a queue that has joined it."""
    context = zmq.asyncio.Context()
    publisher = Publisher(context)
    queue = LiveQueue(context, publisher.address, None)
    try:
        async with asyncio.timeout(SECONDS):
            while not publisher.socket.poll(0):
                await asyncio.sleep(0.005)
        assert publisher.socket.recv() == b"\x01"
        yield publisher, queue
    finally:
        queue.close()
        publisher.socket.close()
        context.destroy(linger=0)


async def arrived(queue: LiveQueue, count: int) -> None:
    async with asyncio.timeout(SECONDS):
        while len(queue._messages) < count:
            await asyncio.sleep(0.005)


async def numbers(queue: LiveQueue, count: int) -> list[list[int]]:
    found: list[list[int]] = []
    while sum(map(len, found)) < count:
        messages = await queue.get(SECONDS)
        assert messages, f"nothing for {SECONDS} s after {found}"
        found.append([message.seq for message in messages])
    return found


async def test_all_that_has_come_is_given_at_once_and_others_have_turns(ends: Ends) -> None:
    publisher, queue = ends
    for seq in range(900):
        publisher.say(seq)
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    other = asyncio.create_task(others())
    await arrived(queue, 900)
    other.cancel()
    given = await numbers(queue, 900)
    assert [*itertools.chain(*given)] == list(range(900))
    assert len(given) < 10 and turns > 900 / AT_ONCE
    assert await queue.get(0.01) == []


async def test_nonsense_is_left_out_and_another_version_is_told_in_its_place(ends: Ends) -> None:
    publisher, queue = ends
    publisher.say(1)
    publisher.send(b"\xc1")
    publisher.send(*[b"more"] * 40)
    publisher.send(OTHER_VERSION)
    publisher.say(2)
    assert await numbers(queue, 1) == [[1]]
    with pytest.raises(VersionError, match="99"):
        await queue.get(SECONDS)
    assert await numbers(queue, 1) == [[2]]
    later = asyncio.create_task(queue.get(SECONDS))
    await asyncio.sleep(0)
    assert not later.done(), "it waits"
    publisher.say(3)
    assert [message.seq for message in await later] == [3]


async def test_what_nobody_takes_waits_in_bounded_room_and_then_goes_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_queue, "MAX_WAITING", 50)
    publisher, queue = ends
    for seq in range(300):
        publisher.say(seq)
    await arrived(queue, 50)
    given = await numbers(queue, 300)
    assert [*itertools.chain(*given)] == list(range(300)) and max(map(len, given)) == 50


def test_the_short_way_of_decoding_gives_what_the_long_one_does() -> None:
    for name, message in examples.EXAMPLES["published by an agent"].items():
        frame = codec.encode(message)
        assert len(frame) <= codec._SHORT_BYTES and codec._VERSIONED in frame, name
        plain = codec._unpack(frame, codec.FRAME_BYTES, codec.CONTROL_CAPS)
        assert repr(codec.decode_live(frame)) == repr(codec._convert(plain, m.Live | m.Heartbeat)), name
