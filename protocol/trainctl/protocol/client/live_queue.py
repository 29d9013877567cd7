"""The messages that an agent publishes, as a queue, taken from its socket all at once as they come, with no task or
future for each, and the rule by which an attachment finds gaps among them."""

import asyncio
import contextlib
import dataclasses
from typing import Any, Literal

import zmq

from trainctl.protocol.errors import ProtocolError, VersionError
from trainctl.protocol.messages import Heartbeat, Live, Snapshot
from trainctl.protocol.security.keyring import Credentials
from trainctl.protocol.wire import codec, sockets

MAX_WAITING = 4096
"""Most messages that wait here; further ones wait in the socket, which drops messages when it is full."""
AT_ONCE = 128
"""Messages taken before other tasks run, so that a flood doesn't block the loop."""


class LiveQueue:
    """A SUB socket, drained whenever something has come; where the reader is slow, ZeroMQ drops and the gap is
    noticed. It belongs to the running event loop."""

    def __init__(self, context: Any, address: str, credentials: Credentials | None) -> None:
        self._socket = sockets.new_socket(context, zmq.SUB, socket_class=zmq.Socket)
        if credentials is not None:
            sockets.secure_client(self._socket, credentials.own, credentials.server)
        self._socket.setsockopt(zmq.SUBSCRIBE, b"")
        sockets.connect(self._socket, address)
        self._descriptor = self._socket.getsockopt(zmq.FD)
        self._loop = asyncio.get_running_loop()
        self._messages: list[Live | Heartbeat] = []
        self._errors: dict[int, VersionError] = {}  # by the number of messages that are given before it
        self._arrived = asyncio.Event()
        self._reads = False
        self._read()

    async def get(self, seconds: float) -> list[Live | Heartbeat]:
        """All that has come and wasn't given yet, oldest first; empty if nothing comes within `seconds`. Raises
        VersionError where an agent spoke another protocol version, after what came before that."""
        if not self._arrived.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._arrived.wait()
        if self._errors:
            return self._before_error()
        found, self._messages = self._messages, []
        self._arrived.clear()
        self._read()
        return found

    def _before_error(self) -> list[Live | Heartbeat]:
        place = min(self._errors)
        if not place:
            error = self._errors.pop(0)
            if not self._messages:  # what came after it isn't here yet
                self._arrived.clear()
            raise error
        found, self._messages = self._messages[:place], self._messages[place:]
        self._errors = {at - place: error for at, error in self._errors.items()}
        return found

    def _read(self) -> None:
        """Read from here on, and what is there already: ZeroMQ reports an arrival only once."""
        if not self._reads:
            self._reads = True
            self._loop.add_reader(self._descriptor, self._drain)
            self._loop.call_soon(self._drain)

    def _stop(self) -> None:
        if self._reads:
            self._reads = False
            self._loop.remove_reader(self._descriptor)

    def _drain(self) -> None:
        """Takes what is there; what is left after so many is for the loop's next turn."""
        for _ in range(AT_ONCE):
            if not self._reads:
                return
            try:
                self._keep(sockets.receive_now(self._socket))
            except zmq.Again:
                return
            except zmq.ZMQError:  # its context was ended
                self._stop()
                return
        self._loop.call_soon(self._drain)

    def _keep(self, frames: list[bytes]) -> None:
        try:
            self._messages.append(codec.decode_live(sockets.check_frames(frames, 2)[1]))
        except VersionError as error:
            self._errors[len(self._messages)] = error
        except ProtocolError:
            return  # not ours; a message of ours that is lost shows as a gap
        self._arrived.set()
        if len(self._messages) >= MAX_WAITING:
            self._stop()

    def close(self) -> None:
        self._stop()
        self._socket.close(linger=0)


@dataclasses.dataclass(frozen=True)
class Connection:
    """The state of the line to the agent; `since_monotonic` is a reading of `time.monotonic`."""

    state: Literal["connecting", "connected", "silent"]
    since_monotonic: float
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Gap:
    """Messages first..last of this boot were published and not seen."""

    boot: str
    first: int
    last: int


class Attachment:
    """A client's place in one agent's sequence of live messages."""

    def __init__(self, snapshot: Snapshot) -> None:
        self.boot, self.seq = snapshot.boot, snapshot.seq

    def judge(self, message: Live | Heartbeat) -> Literal["deliver", "drop", "reattach"] | Gap:
        """Return what to do with a message. A Gap is to be filled first; then judge the message again."""
        if message.boot != self.boot:
            return "reattach"
        if isinstance(message, Heartbeat):
            return Gap(self.boot, self.seq + 1, message.seq) if message.seq > self.seq else "deliver"
        if message.seq <= self.seq:
            return "drop"
        if message.seq > self.seq + 1:
            return Gap(self.boot, self.seq + 1, message.seq - 1)
        self.seq = message.seq
        return "deliver"
