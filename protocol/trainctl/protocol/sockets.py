"""Every ZeroMQ socket the program opens, with the options that keep it bounded and honest, and where it may bind."""

import asyncio
import ipaddress
from typing import Any
from urllib.parse import urlsplit

import zmq

from trainctl.protocol.codec import CONTROL_FRAME_BYTES, FRAME_BYTES
from trainctl.protocol.errors import InvalidInputError, ProtocolError
from trainctl.protocol.keys import KeyPair

DEFAULT_PORT = 7474
"""Where an agent listens for requests; it publishes on the port after."""

MAX_FRAMES = 8
SUBSCRIPTION_BYTES = 512
"""Largest frame a publisher takes: a handshake or a subscription, each byte of which costs it some 50."""
LISTENING = (zmq.ROUTER, zmq.PUB)
"""Kinds that are bound and connected to. They send no heartbeats of their own: libzmq 4.3.5 aborts the process when one
is due on a connection whose peer has gone while more of it waits than the socket takes (RCVHWM). They answer those of
their peers, and by the time to live in these they notice that a peer is gone."""


def new_socket(context: Any, kind: int, *, control: bool = False, socket_class: Any = None) -> Any:
    """A socket of `context` (plain or asyncio) with the common options; `control` caps frames at 64 KiB;
    `socket_class` is the context's own unless given."""
    socket = context.socket(kind, socket_class=socket_class)
    socket.setsockopt(zmq.LINGER, 0)
    limit = SUBSCRIPTION_BYTES if kind == zmq.PUB else CONTROL_FRAME_BYTES if control else FRAME_BYTES
    socket.setsockopt(zmq.MAXMSGSIZE, limit)
    # Half as long where idle connections may hold all descriptors: of 600 at 256 the last round is over in 2 s.
    socket.setsockopt(zmq.HANDSHAKE_IVL, 1000 if kind in LISTENING else 2000)
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


def secure_client(socket: Any, own: KeyPair, server: str) -> None:
    """Have a socket speak only to who holds the secret of the public key `server`, as `own`; before it connects."""
    socket.curve_serverkey = server.encode()
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()


def secure_server(socket: Any, own: KeyPair, domain: str) -> None:
    """Have a socket serve, as `own`, only those that the authenticator of its context lets into `domain`; before it
    binds. Without an authenticator it serves nobody."""
    if not domain:
        raise ValueError("an empty domain would let everybody in")
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = own.public.encode(), own.secret.encode()
    socket.zap_domain = domain.encode()
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)


def is_near(address: str) -> bool:
    """Whether an address is on loopback or a local socket file. Raises InvalidInputError for what is no address."""
    parts = split(address)
    return parts.scheme == "ipc" or is_loopback(parts.hostname or "")


def check_bind(address: str, *, keys: bool = False) -> None:
    """Refuse to listen without keys anywhere but on loopback or a local socket file, and on all interfaces at once.

    Raises InvalidInputError.
    """
    if not keys and not is_near(address):
        raise InvalidInputError(
            address, "without keys only loopback is listened on; make keys and let someone in: "
            "trainctl keys new; trainctl keys authorize NAME KEY --role operator",
        )  # fmt: skip
    if split(address).hostname in ("*", "0.0.0.0", "::"):  # noqa: S104
        raise InvalidInputError(address, "name the one address that others reach it at, such as tcp://10.0.0.5:7474")


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


async def receive_from(socket: Any) -> tuple[list[bytes], str]:
    """As `receive`, and the public key, Z85, of who sent it; empty if the socket uses no keys."""
    frame = await socket.recv(copy=False)
    frames: list[bytes] = [frame.bytes]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        frame = await socket.recv(copy=False)
        count += 1
        if count <= MAX_FRAMES:
            frames.append(frame.bytes)
    return (frames if count <= MAX_FRAMES else [*frames, b""]), _sender(frame)


def _sender(frame: Any) -> str:
    try:
        return str(frame.get("User-Id"))
    except zmq.ZMQError:
        return ""


async def receive(socket: Any) -> list[bytes]:
    """One message of an asyncio socket, frame by frame; past MAX_FRAMES frames are dropped unread.

    Others have a turn before each: what waits already is received without one, and a flood would keep it for itself.
    """
    await asyncio.sleep(0)
    frames: list[bytes] = [await socket.recv()]
    count = 1
    while socket.getsockopt(zmq.RCVMORE):
        frame: bytes = await socket.recv(zmq.DONTWAIT)  # it came with the first, and waiting for it costs much
        count += 1
        if count <= MAX_FRAMES:
            frames.append(frame)
    return frames if count <= MAX_FRAMES else [*frames, b""]
