"""A trainer's control thread, and the agent's end of its socket."""

import time
from typing import TypeVar

import zmq
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.wire import codec
from trainctl.trainer.control.thread import Control
from trainctl.trainer.step.rank import Identity

DEADLINE_SECONDS = HANG_SECONDS
WHO = Identity("r", "here", 0)
M = TypeVar("M", bound=m.Message)


class Line:
    """A control thread, and the agent's end of its socket."""

    def __init__(self, control: Control, socket: "zmq.Socket[bytes]") -> None:
        self.control, self._socket = control, socket
        self._trainer = b""  # who sent the last message

    def tell(self, *orders: m.ToTrainer) -> None:
        for order in orders:
            self._socket.send_multipart([self._trainer, codec.encode(order)])

    def close(self) -> None:
        self._socket.close(linger=0)

    def hear(self, kind: type[M]) -> M:
        """The next message but heartbeats, which must be of a kind."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self._socket.poll(max(0, int(1000 * (deadline - time.monotonic())))):
            self._trainer, frame = self._socket.recv_multipart()
            message = codec.decode_answer(frame)
            if isinstance(message, kind):
                return message
            assert isinstance(message, m.Alive), message
        raise AssertionError(f"no {kind.__name__} within {DEADLINE_SECONDS:.0f} s")
