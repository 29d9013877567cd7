"""The local socket between an agent and the trainers it hosts."""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from trainctl.node_agent.trainers.oom_detection import Held
from trainctl.node_agent.transport import bind
from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.messages import (
    RANK_COLUMNS,
    CheckpointProgress,
    FromTrainer,
    Report,
    ToTrainer,
    WorkAsk,
    WorkSlice,
)
from trainctl.protocol.wire import codec, sockets

_POLLIN = int(zmq.POLLIN)
LEFT_CONNECTIONS = 64
"""Former connections of a rank that are remembered. While its agent stands still, a trainer makes one every few
seconds."""


class TrainerLink:
    """A ROUTER on a socket file; a trainer is addressed by (run, rank) once it has spoken."""

    def __init__(self, context: Any, folder: Callable[[], Path]) -> None:
        """`folder` returns where the node's sockets belong now."""
        self.files = bind.SocketFiles(folder)
        self._first = f"ipc://{folder() / 'trainers.sock'}"
        self._peers: dict[tuple[str, int], bytes] = {}
        self._left: dict[tuple[str, int], deque[bytes]] = {}  # former connections, oldest first
        self._held: dict[tuple[str, int], Held] = {}
        self._writes: dict[tuple[str, int], tuple[int, int, float]] = {}  # step, bytes, when they last grew
        # Plain: pyzmq makes futures for each message and each answer, which takes half as long again.
        self.socket = sockets.new_socket(context, zmq.ROUTER, socket_class=zmq.Socket)
        self._arrived, self._watched = asyncio.Event(), -1  # the descriptor that the loop watches
        bind.bind(self.socket, self._first)
        self.files.keep(self._first, lambda: self.socket)

    @property
    def endpoint(self) -> str:
        """Return the address at which trainers that start now find it."""
        return self.files.current(self._first)

    def serve_at(self, endpoint: str) -> None:
        """Listen there too, for trainers that look for their agent at another agent's file."""
        self.files.add(endpoint, lambda: self.socket)
        self._look_again()

    def look_at_files(self) -> None:
        """Bind again where a socket's file is gone; call it every second or so."""
        self.files.look()
        self._look_again()

    def _look_again(self) -> None:
        """Have `receive` see what the descriptor no longer shows: every call into the socket may read its wake-ups."""
        if self.socket.get(zmq.EVENTS) & _POLLIN:
            self._arrived.set()

    async def receive(self) -> tuple[FromTrainer | WorkAsk, bool] | None:
        """The next message, and whether a known rank speaks over a new connection; None: not of this protocol. Messages
        of connections that it has left may still come in between."""
        frames = await self._receive()
        try:
            identity, frame = sockets.check_frames(frames, 2)
            message = codec.decode_answer(frame)
        except ProtocolError:
            return None
        key = message.run, message.rank
        before, left = self._peers.get(key), self._left.setdefault(key, deque(maxlen=LEFT_CONNECTIONS))
        is_new = identity not in (before, *left)
        if is_new:
            left.extend([before] if before is not None else [])
            self._peers[key] = identity
        if isinstance(message, Report) and (message.kind == "train" or key not in self._held):
            self._held[key] = Held(*map(message.values.get, RANK_COLUMNS))
        elif isinstance(message, CheckpointProgress):
            self._note_progress(key, message)
        return message, is_new and before is not None

    async def _receive(self) -> list[bytes]:
        """Others have a turn before each message, or a flood would keep the loop for itself."""
        while True:
            await asyncio.sleep(0)
            self._arrived.clear()
            try:
                return sockets.receive_now(self.socket)
            except zmq.Again:
                if self._watched < 0:
                    self._watched = self.socket.FD
                    asyncio.get_running_loop().add_reader(self._watched, self._arrived.set)
                await self._arrived.wait()

    def _note_progress(self, key: tuple[str, int], said: CheckpointProgress) -> None:
        if self._writes.get(key, (-1, -1, 0.0))[:2] != (said.step, said.done_bytes):
            self._writes[key] = said.step, said.done_bytes, time.monotonic()

    def wrote_monotonic(self, run: str, rank: int) -> float:
        """Return the time at which the checkpoint that a rank writes last made progress, by time.monotonic; 0 if it
        never wrote one."""
        return self._writes.get((run, rank), (0, 0, 0.0))[2]

    def held(self, run: str, rank: int) -> Held | None:
        """Return what memory a rank's last step took, or its first plan before any step; None if it has reported
        neither."""
        return self._held.get((run, rank))

    def forget_held(self, run: str, rank: int) -> None:
        """Another process takes its place."""
        self._held.pop((run, rank), None)
        self._writes.pop((run, rank), None)

    async def send(self, rank: int, message: ToTrainer | WorkSlice) -> bool:
        """Return whether the trainer was there to take it."""
        identity = self._peers.get((message.run, rank))
        if identity is None:
            return False
        try:
            self.socket.send_multipart([identity, codec.encode(message)], zmq.DONTWAIT)
        except zmq.ZMQError:
            return False
        self._look_again()
        return True

    def close(self) -> None:
        """Let go of the socket; its files stay, for a trainer that is to find the next agent by them."""
        if self._watched >= 0:
            asyncio.get_running_loop().remove_reader(self._watched)
        self.socket.close(linger=0)

    def forget(self, run: str) -> None:
        self._peers = {key: identity for key, identity in self._peers.items() if key[0] != run}
        self._left = {key: left for key, left in self._left.items() if key[0] != run}
        self._held = {key: held for key, held in self._held.items() if key[0] != run}
        self._writes = {key: write for key, write in self._writes.items() if key[0] != run}
