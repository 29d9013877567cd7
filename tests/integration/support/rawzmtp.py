"""ZMTP 3.0 spoken byte by byte, for peers that no ZeroMQ library would be: silent, or endlessly talkative."""

import socket
import struct
from urllib.parse import urlsplit

from tests.waiting import HANG_SECONDS

MORE, LONG, COMMAND = 1, 2, 4
_GREETING_BYTES = 64


def connect(address: str, seconds: float = HANG_SECONDS) -> socket.socket:
    """A connection that has said nothing yet, to `tcp://host:port` or `ipc://path`."""
    parts = urlsplit(address)
    if parts.scheme == "ipc":
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.settimeout(seconds)
        made.connect(parts.path)
        return made
    assert parts.hostname is not None and parts.port is not None
    return socket.create_connection((parts.hostname, parts.port), timeout=seconds)


def greeting(mechanism: bytes = b"NULL") -> bytes:
    return b"\xff" + bytes(8) + b"\x7f" + b"\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)


def ready(kind: bytes) -> bytes:
    """The command that ends a handshake without keys, of a socket of such a kind."""
    properties = b"".join(
        bytes([len(name)]) + name + struct.pack(">I", len(value)) + value
        for name, value in ((b"Socket-Type", kind), (b"Identity", b""))
    )
    body = b"\x05READY" + properties
    return bytes([COMMAND, len(body)]) + body


def header(size: int, *, flags: int = 0) -> bytes:
    """Return the header of a frame of so many bytes, with a long size however few they are."""
    return bytes([flags | LONG]) + struct.pack(">Q", size)


def framed(frame: bytes) -> bytes:
    """A message of one frame, as it goes over the wire."""
    return (bytes([0, len(frame)]) if len(frame) < 256 else header(len(frame))) + frame


def shaken(address: str, kind: bytes = b"DEALER") -> socket.socket:
    """A connection whose handshake is done: what is sent on it next are frames."""
    made = connect(address)
    made.sendall(greeting() + ready(kind))
    left = _GREETING_BYTES
    while left:
        got = made.recv(left)
        assert got, "closed during the greeting"
        left -= len(got)
    assert made.recv(1) == bytes([COMMAND]), "READY is a command"
    (size,) = made.recv(1)
    while size:
        size -= len(made.recv(size))
    return made


def stream(made: socket.socket, total_bytes: int, piece: bytes = bytes(65536)) -> int:
    """Send so many bytes, unless the other side hangs up; how many it took."""
    sent = 0
    try:
        while sent < total_bytes:
            made.sendall(piece)
            sent += len(piece)
    except OSError:
        pass
    return sent
