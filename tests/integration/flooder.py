"""Mutated frames at a socket, as fast as it takes them, over connections made again whenever the other side hangs up.

`python -m tests.integration.flooder ADDRESS KIND CONVERSATION FRAMES SEED` prints how many it sent, as JSON.
"""

import contextlib
import json
import socket
import struct
import sys
import threading

from tests.integration import rawzmtp
from tests.protocol.mutations import Mutator

from trainctl.protocol.codec import CONTROL_FRAME_BYTES

BATCH_BYTES = 32_768
HANG_UPS_EVERY = 500
"""A frame over the limit ends its connection, so that few of them are sent."""


def flood(address: str, kind: str, conversation: str, count: int, seed: int) -> dict[str, int]:
    """Send; gives how many frames went out and how many connections that took."""
    mutator, sent, large, connections = Mutator(conversation, seed), 0, 0, 0
    while sent < count:
        connections += 1
        with contextlib.suppress(OSError, AssertionError), contextlib.closing(_connected(address, kind)) as made:
            while sent < count:
                batch, size = [], 0
                while size < BATCH_BYTES and sent + len(batch) < count:
                    frame = mutator.frame()
                    large += len(frame) > CONTROL_FRAME_BYTES
                    if len(frame) > CONTROL_FRAME_BYTES and large % HANG_UPS_EVERY:
                        continue
                    batch.append(_framed(frame, kind))
                    size += len(frame)
                sent += len(batch)
                made.sendall(b"".join(batch))
    return {"sent": sent, "connections": connections}


def _framed(frame: bytes, kind: str) -> bytes:
    """On a publisher's socket the frames of subscribers are taken: every other one begins as a subscription does."""
    if kind == "SUB" and len(frame) % 2:
        frame = bytes([len(frame) % 3]) + frame
    return (bytes([0, len(frame)]) if len(frame) < 256 else rawzmtp.header(len(frame))) + frame


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
    where, what, talk, frames, number = sys.argv[1:]
    print(json.dumps(flood(where, what, talk, int(frames), int(number))))
