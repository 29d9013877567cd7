"""Every ZeroMQ socket the program opens, with the options that keep it bounded and honest, and the end of the tasks
that read them."""

import asyncio
import ctypes
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import zmq

from trainctl.protocol.errors import ProtocolError
from trainctl.protocol.security.keys import KeyPair
from trainctl.protocol.wire.codec import CONTROL_FRAME_BYTES, FRAME_BYTES

DEFAULT_PORT = 7474
"""Port on which an agent listens for requests; it publishes on the next one."""

MAX_FRAMES = 8
SUBSCRIPTION_BYTES = 512
"""Most bytes of a frame that a publisher accepts, a handshake or a subscription; each byte costs it about 50."""
CONTROL_WAITING = 8
"""Most messages of one connection that wait at an agent's socket for requests, at most 64 KiB each. Further ones wait
on the sender's side."""
SUBSCRIPTIONS_WAITING = 16
"""Most messages of one subscriber that wait until the publisher next uses its socket."""
LISTENING = (zmq.ROUTER, zmq.XPUB)
"""Kinds of sockets that are bound."""
SILENT = (*LISTENING, zmq.SUB)
"""Kinds that send no heartbeats of their own. While more waits than the socket takes (RCVHWM) libzmq 4.3.5 reads no
further, and aborts the process if one is due and the peer has gone, or if its answer isn't read in time and the socket
is read from later. Those that are bound answer their peers', and by the time to live in these they notice that one is
gone; a subscriber has the system ask."""


def new_socket(context: Any, kind: int, *, control: bool = False, socket_class: Any = None) -> Any:
    """A socket of `context` (plain or asyncio) with the common options; `control` caps frames at 64 KiB;
    `socket_class` is the context's own unless given."""
    if kind == zmq.ROUTER:
        _seed_identities()
    socket = context.socket(kind, socket_class=socket_class)
    socket.setsockopt(zmq.LINGER, 0)
    limit = SUBSCRIPTION_BYTES if kind == zmq.XPUB else CONTROL_FRAME_BYTES if control else FRAME_BYTES
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    # Half as long where idle connections may hold all descriptors: of 600 at 256 the last round is over in 2 s.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 if kind in LISTENING else 2000)
    if kind in SILENT:
        _keep_alive(socket, *((10, 5) if kind in LISTENING else (2, 1)))
    else:
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        socket.setsockopt(zmq.HEARTBEAT_TTL, 3000)
    socket.setsockopt(zmq.RECONNECT_IVL, 200)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 5000)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, 3000)
    if kind == zmq.XPUB:
        socket.setsockopt(zmq.SNDHWM, 1000)
        socket.setsockopt(zmq.RCVHWM, SUBSCRIPTIONS_WAITING)
    elif kind == zmq.SUB:
        socket.setsockopt(zmq.RCVHWM, 10000)
    elif kind == zmq.ROUTER:
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 0)
        socket.setsockopt(zmq.RCVHWM, CONTROL_WAITING if control else 1000)
    elif kind == zmq.DEALER:
        socket.setsockopt(zmq.IMMEDIATE, 1)
    return socket


def connect(socket: Any, address: str) -> None:
    """Connect a socket to an agent's address, of either family."""
    _use_family(socket, address)
    socket.connect(address)


def bind(socket: Any, address: str) -> None:
    """Bind a socket to an address, of either family. Raises zmq.ZMQError."""
    _use_family(socket, address)
    socket.bind(address)


def _use_family(socket: Any, address: str) -> None:
    """Have IPv6 where the address is of IPv6. A host's name is looked up in IPv4: with this option libzmq takes only
    the first of its addresses, which would mostly be one where no agent listens."""
    socket.setsockopt(zmq.IPV6, int(address.startswith("tcp://[")))


def _seed_identities() -> None:
    """A ROUTER numbers its connections from a random number of the C library's, which libzmq 4.3.5 never seeds: every
    agent would begin with the same one. Who knows the next number can claim it as an identity, and libzmq aborts the
    process when it comes to give it."""
    ctypes.CDLL(None).srand(ctypes.c_uint(secrets.randbits(32)))


def _keep_alive(socket: Any, idle_seconds: int, between_seconds: int) -> None:
    """Have the system notice a peer that is gone without a word and had sent no heartbeats."""
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle_seconds)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, between_seconds)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 3)


def secure_client(socket: Any, own: KeyPair, server: str) -> None:
    """Have a socket speak only to who holds the secret of the public key `server`, as `own`; before it connects."""
    socket.curve_serverkey = server.encode()
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()


def secure_server(socket: Any, own: KeyPair, domain: str) -> None:
    """Have a socket serve, as `own`, only those that the authenticator of its context lets into `domain`; before it
    binds. Without an authenticator it serves no one."""
    if not domain:
        raise ValueError("an empty domain would admit every key")
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
    socket.zap_domain = domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def check_frames(frames: list[bytes], wanted: int) -> list[bytes]:
    """The frames of one message. Raises ProtocolError if their count is not what this socket speaks."""
    if len(frames) != wanted:
        raise ProtocolError(f"a message has {len(frames)} frames, expected {wanted}")
    return frames


@dataclass(frozen=True)
class Sender:
    """The sender of one message."""

    public: str = ""  # Z85; empty: the socket uses no keys
    descriptor: int = -1  # of the connection that it came over; -1: not known


async def receive_from(socket: Any) -> tuple[list[bytes], Sender]:
    """Receive one message as `receive` does, and say who sent it."""
    frames = await _receive(socket)
    return [frame.bytes for frame in frames], _sender(frames[0])


async def receive(socket: Any) -> list[bytes]:
    """One message of an asyncio socket, frame by frame; past MAX_FRAMES frames are dropped unread, and an empty one
    is added, so that there are too many."""
    return [frame.bytes for frame in await _receive(socket)]


async def _receive(socket: Any) -> list[Any]:
    """Others have a turn before each message: what waits already is received without one, and a flood would keep the
    loop for itself."""
    await asyncio.sleep(0)
    frames = [await socket.recv(copy=False)]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        frame = await socket.recv(zmq.DONTWAIT, copy=False)  # it came with the first; to wait for it costs much
        count += 1
        if count <= MAX_FRAMES:
            frames.append(frame)
    return frames if count <= MAX_FRAMES else [*frames, zmq.Frame()]


def receive_now(socket: Any) -> list[bytes]:
    """Receive one message that is there from a plain socket, as `receive` does but without waiting. Raises zmq.Again
    where none is."""
    frames = [socket.recv(zmq.DONTWAIT)]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        frame = socket.recv(zmq.DONTWAIT)
        count += 1
        if count <= MAX_FRAMES:
            frames.append(frame)
    return frames if count <= MAX_FRAMES else [*frames, b""]


def _sender(frame: Any) -> Sender:
    try:
        return Sender(str(frame.get("User-Id")), int(frame.get(zmq.SRCFD)))
    except zmq.ZMQError:
        return Sender()


AGAIN_SECONDS = 10.0
"""Seconds after which a task that has not ended is cancelled again: what it awaited may have swallowed the first."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended, whatever their outcomes. Raises CancelledError if the caller is
    cancelled meanwhile, unlike `suppress(CancelledError)` around an await, which would swallow that."""
    ended, left = set[asyncio.Task[Any]](), set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        ended |= done
    for task in ended:
        if not task.cancelled():
            task.exception()  # else asyncio reports it as never retrieved
