"""Every ZeroMQ socket the program opens, with the options that keep it bounded and honest, and where it may bind."""

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import zmq

from trainctl.protocol.codec import CONTROL_FRAME_BYTES, FRAME_BYTES
from trainctl.protocol.errors import InvalidInputError, ProtocolError

DEFAULT_PORT = 7474
"""Where an agent listens for requests; it publishes on the port after."""

MAX_FRAMES = 8
SUBSCRIPTION_BYTES = 512
"""Largest frame a publisher takes: a handshake or a subscription, each byte of which costs it some 50."""
LISTENING = (zmq.ROUTER, zmq.PUB)
"""Kinds that are bound and connected to. They send no heartbeats of their own: libzmq 4.3.5 aborts the process when one
is due on a connection whose peer has gone while more of it waits than the socket takes (RCVHWM). They answer those of
their peers, and by the time to live in these they notice that a peer is gone."""


def new_socket(context: Any, kind: int, *, control: bool = False) -> Any:
    """A socket of `context` (plain or asyncio) with the common options; `control` caps frames at 64 KiB."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)
    limit = SUBSCRIPTION_BYTES if kind == zmq.PUB else CONTROL_FRAME_BYTES if control else FRAME_BYTES
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    socket.setsockopt(zmq.HANDSHAKE_IVL, 2000)
    if kind in LISTENING:
        _keep_alive(socket)
    else:
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 3000)
    socket.setsockopt(zmq.RECONNECT_IVL, 200)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
    if kind == zmq.PUB:
        socket.setsockopt(zmq.SNDHWM, 1000)
    elif kind == zmq.SUB:
        socket.setsockopt(zmq.RCVHWM, 10000)
    elif kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
    elif kind == zmq.DEALER:
        socket.setsockopt(zmq.IMMEDIATE, 1)
    return socket


def _keep_alive(socket: Any) -> None:
    """Have the system notice a peer that is gone without a word and had sent no heartbeats."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 10)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 5)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def check_bind(address: str) -> None:
    """Refuse to listen anywhere but on loopback or a local socket file. Raises InvalidInputError."""
    parts = split(address)
    if parts.scheme == "ipc":
        return
    if not is_loopback(parts.hostname or ""):
        raise InvalidInputError(
            address,
            "only loopback can be listened on without keys, and keys are not part of this version; use 127.0.0.1",
        )


def split(address: str) -> Any:
    """The parts of `tcp://host:port` or `ipc://path`. Raises InvalidInputError for anything else."""
    parts = urlsplit(address)
    if parts.scheme == "ipc" and (parts.path or parts.netloc):
        return parts
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "tcp" or not parts.hostname or port is None:
        raise InvalidInputError(address or "address", "an address is tcp://host:port, such as tcp://127.0.0.1:7474")
    return parts


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_frames(frames: list[bytes], wanted: int) -> list[bytes]:
    """The frames of one message. Raises ProtocolError if their count is not what this socket speaks."""
    if len(frames) != wanted:
        raise ProtocolError(f"a message of {len(frames)} frames where {wanted} are spoken")
    return frames


async def receive(socket: Any) -> list[bytes]:
    """One message of an asyncio socket, frame by frame; past MAX_FRAMES frames are dropped unread.

    Others have a turn before each: what waits already is received without one, and a flood would keep it for itself.
    """
    await asyncio.sleep(0)
    frames: list[bytes] = [await socket.recv()]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        frame: bytes = await socket.recv()
        count += 1
        if count <= MAX_FRAMES:
            frames.append(frame)
    return frames if count <= MAX_FRAMES else [*frames, b""]
