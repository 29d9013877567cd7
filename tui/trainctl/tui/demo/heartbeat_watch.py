"""Whether a demo's agent that lives is still heard of: by its heartbeats, and by a clock that was itself looked at."""

import asyncio
import contextlib
import time
from collections.abc import Callable

import zmq

from trainctl.protocol import messages as m
from trainctl.protocol.wire import sockets

HUNG_SECONDS = 5.0
"""An agent's heartbeats come each second."""
FIRST_SECONDS = 30.0
"""For the first of them: it may have a record to read."""
LOOK_SECONDS = 0.25
GAP_SECONDS = 2.0
"""A watcher that looks so late was stopped or asleep itself, and knows nothing of the time between."""


class HeartbeatWatch:
    """Pure: given heartbeats and asked at times of a monotonic clock."""

    def __init__(self, now: float) -> None:
        self._since, self._looked, self._limit_seconds = now, now, FIRST_SECONDS

    def beat(self, now: float) -> None:
        """A heartbeat has come."""
        self._since, self._limit_seconds = now, HUNG_SECONDS

    def is_lost(self, now: float) -> bool:
        """Whether none has come for too long."""
        if now - self._looked > GAP_SECONDS:
            self._since = now
        self._looked = now
        return now - self._since >= self._limit_seconds


async def until_lost(live_address: str, clock: Callable[[], float] = time.monotonic) -> None:
    """Return when the agent that publishes at `live_address` has not been heard of for too long."""
    context = zmq.Context()
    try:
        socket = sockets.new_socket(context, zmq.SUB)
        socket.setsockopt(zmq.SUBSCRIBE, m.TOPICS[m.Heartbeat])
        sockets.connect(socket, live_address)
        pulse = HeartbeatWatch(clock())
        while not pulse.is_lost(clock()):
            if _has_beaten(socket):
                pulse.beat(clock())
            await asyncio.sleep(LOOK_SECONDS)
    finally:
        context.destroy(linger=0)


def _has_beaten(socket: "zmq.Socket[bytes]") -> bool:
    """Whether a heartbeat has come since the last look; reads them all."""
    found = False
    with contextlib.suppress(zmq.Again):
        while True:
            socket.recv_multipart(zmq.NOBLOCK)
            found = True
    return found
