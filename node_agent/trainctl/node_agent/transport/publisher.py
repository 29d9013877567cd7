"""Live messages out: each gets this boot's next sequence number and is kept a while for those who missed it."""

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import zmq

from trainctl.node_agent.transport.subscriber_limits import SubscriberLimits
from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec

KEPT_MESSAGES = 10_000
"""Newest live messages that can be requested again; a client that missed more attaches again from the record."""


class Publisher:
    """The one writer of an XPUB socket; `seq` is the last number given out."""

    def __init__(self, socket: Any, boot: str, listeners: Sequence[Callable[[m.Live], object]] = ()) -> None:
        self._socket, self._limits, self.boot, self.seq = socket, SubscriberLimits(socket), boot, 0
        self._kept: deque[m.Live] = deque(maxlen=KEPT_MESSAGES)
        self.listeners = [*listeners]
        """Each is given every message that is published, in this order."""

    @property
    def socket(self) -> Any:
        """None while none is bound."""
        return self._socket

    def turn_to(self, socket: Any) -> Any:
        """Publish on another socket from here on, on none if None; gives the one before. Numbers continue."""
        before, self._socket = self._socket, socket
        if socket is not None:
            self._limits = SubscriberLimits(socket)
        return before

    def publish(self, message: m.Live) -> None:
        """Number, keep and send. A subscriber that is too slow loses it and notices by the number."""
        self.seq += 1
        numbered = msgspec.structs.replace(message, boot=self.boot, seq=self.seq)
        self._kept.append(numbered)
        self._send(numbered)
        for heard in self.listeners:
            heard(numbered)

    def beat(self, beat: m.Heartbeat) -> None:
        """Send a heartbeat carrying the last number given out."""
        self._send(msgspec.structs.replace(beat, boot=self.boot, seq=self.seq))

    def again(self, first_seq: int, last_seq: int, limit: int) -> tuple[m.Live, ...] | None:
        """The messages first..last, at most `limit` of them, or None if the first is no longer kept."""
        if not self._kept or first_seq < self._kept[0].seq or first_seq > self.seq:
            return None
        skip = first_seq - self._kept[0].seq
        count = min(last_seq - first_seq + 1, limit, len(self._kept) - skip)
        return tuple(self._kept[skip + index] for index in range(count))

    def _send(self, message: m.Live | m.Heartbeat) -> None:
        if self._socket is None:
            return  # it is just being bound again: subscribers will see the gap
        with contextlib.suppress(zmq.Again):  # no room for any subscriber: they will see the gap
            self._socket.send_multipart([m.TOPICS[type(message)], codec.encode(message)], zmq.DONTWAIT)
        self._limits.hear()
