"""A cancellation reaches every task that it is meant for, also while that one ends others."""

import asyncio

import pytest
import zmq
import zmq.asyncio
from tests.waiting import HANG_SECONDS

from trainctl.protocol.wire import tasks
from trainctl.protocol.wire.handshake import HandshakeWatch


async def test_a_task_that_swallows_its_cancellation_is_cancelled_again(monkeypatch):
    monkeypatch.setattr(tasks, "AGAIN_SECONDS", 0.01)
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
        await tasks.end_tasks([task])
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
