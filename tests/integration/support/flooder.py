"""Mutated frames at a socket, as fast as it takes them, over connections made again whenever the other side hangs up.

`python -m tests.integration.support.flooder ADDRESS KIND CONVERSATION FRAMES SEED` prints how many it sent, as JSON.
With a FOLDER of keys and the public key of the SERVER besides, the frames come in that user's session.
"""

import contextlib
import json
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq
from tests.integration.support import rawzmtp
from tests.protocol.support.mutations import Mutator

from trainctl.protocol.security.keys import KeyFolder
from trainctl.protocol.wire import sockets
from trainctl.protocol.wire.codec import CONTROL_FRAME_BYTES

BATCH_BYTES = 32_768
HANG_UPS_EVERY = 500
"""A frame over the limit ends its connection, so that few of them are sent."""
KINDS = {"DEALER": zmq.DEALER, "SUB": zmq.XSUB}
"""Kinds of sockets whose frames go out as they are given."""


def frames(conversation: str, kind: str, seed: int) -> Iterator[bytes]:
    """Endless ones. On a publisher's socket the frames of subscribers are taken: every other one begins as a
    subscription does."""
    mutator, large = Mutator(conversation, seed), 0
    while True:
        frame = mutator.frame()
        large += len(frame) > CONTROL_FRAME_BYTES
        if len(frame) > CONTROL_FRAME_BYTES and large % HANG_UPS_EVERY:
            continue
        yield bytes([len(frame) % 3]) + frame if kind == "SUB" and len(frame) % 2 else frame


def flood(address: str, kind: str, conversation: str, count: int, seed: int) -> dict[str, int]:
    """Send without keys; gives how many frames went out and how many connections that took."""
    made, sent, connections = frames(conversation, kind, seed), 0, 0
    while sent < count:
        connections += 1
        with contextlib.suppress(OSError, AssertionError), contextlib.closing(_connected(address, kind)) as connection:
            while sent < count:
                batch, size = [], 0
                while size < BATCH_BYTES and sent + len(batch) < count:
                    batch.append(rawzmtp.framed(next(made)))
                    size += len(batch[-1])
                sent += len(batch)
                connection.sendall(b"".join(batch))
    return {"sent": sent, "connections": connections}


def flood_session(
    address: str, kind: str, conversation: str, count: int, seed: int, folder: Path, server: str
) -> dict[str, int]:
    """Send in a session of a folder's user; gives how many frames went out and how many messages came back."""
    context: Any = zmq.Context()
    session, answers = sockets.new_socket(context, KINDS[kind]), 0
    sockets.secure_client(session, KeyFolder(folder).user(), server)
    session.setsockopt(zmq.HEARTBEAT_IVL, 0)  # libzmq 4.3.5 aborts who has one due just after the other side hung up
    session.setsockopt(zmq.SNDTIMEO, 30_000)
    session.connect(address)
    for _, frame in zip(range(count), frames(conversation, kind, seed), strict=False):
        session.send(frame)
        while session.poll(0):
            session.recv_multipart()
            answers += 1
    while session.poll(500):
        session.recv_multipart()
        answers += 1
    context.destroy(linger=0)
    return {"sent": count, "answers": answers}


def _connected(address: str, kind: str) -> socket.socket:
    made = rawzmtp.shaken(address, kind.encode())
    made.settimeout(30)
    threading.Thread(target=_drain, args=(made.dup(),), daemon=True).start()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 0, 0))
    return made


def _drain(made: socket.socket) -> None:
    """Replies are read, or else the other side would stop to send them."""
    with contextlib.suppress(OSError), made:
        while made.recv(65536):
            pass


if __name__ == "__main__":
    where, what, talk, frames_wanted, number, *keys = sys.argv[1:]
    asked = (where, what, talk, int(frames_wanted), int(number))
    print(json.dumps(flood_session(*asked, Path(keys[0]), keys[1]) if keys else flood(*asked)))
