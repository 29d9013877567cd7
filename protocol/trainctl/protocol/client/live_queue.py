"""A queue of what an agent publishes, taken from its socket all at once as it comes, with no task or future for each
message."""

import asyncio
import contextlib
from typing import Any

import zmq

from trainctl.protocol.errors import ProtocolError, VersionError
from trainctl.protocol.messages import Heartbeat, Live
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
