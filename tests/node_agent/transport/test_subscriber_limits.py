"""A subscriber that says too much is hung up on, whatever it says; others hear on, and memory stays small."""

import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.integration.support import rawzmtp
from tests.waiting import HANG_SECONDS
from tools.protocol_docs import examples

from trainctl.node_agent.transport.bind import bind
from trainctl.node_agent.transport.publisher import MOST_BYTES, MOST_SAID, Publisher
from trainctl.protocol.wire import sockets

EVENT: Any = examples.EXAMPLES["published by an agent"]["event"]


class Place:
    """A publisher and where it is."""

    def __init__(self, context: Any, address: str) -> None:
        bound = sockets.new_socket(context, zmq.XPUB)
        self.address = bind(bound, address)
        self.publisher = Publisher(bound, "b" * 16)

    def publish_until(self, done: Any) -> None:
        deadline = time.monotonic() + HANG_SECONDS
        while not done():
            assert time.monotonic() < deadline
            self.publisher.publish(EVENT)
            time.sleep(0.005)

    def hangs_up_on(self, *said: bytes) -> bool:
        """Or goes on to publish to who has said all this."""
        with rawzmtp.shaken(self.address, b"SUB") as made:
            made.sendall(rawzmtp.framed(b"\1") + b"".join(map(rawzmtp.framed, said)))
            return self._ends(made)

    def _ends(self, made: socket.socket) -> bool:
        made.settimeout(0.01)
        heard = -1
        deadline = time.monotonic() + HANG_SECONDS
        while heard < 3 * MOST_SAID:  # rounds in which it could have been
            assert time.monotonic() < deadline
            self.publisher.publish(EVENT)
            try:
                if not made.recv(65536):
                    return True
                heard += 1
            except TimeoutError:
                continue
            except ConnectionError:
                return True
        return False


@pytest.fixture(params=["tcp", "ipc"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    context: Any = zmq.Context()
    yield Place(context, "tcp://127.0.0.1:0" if request.param == "tcp" else f"ipc://{tmp_path}/live")
    context.destroy(linger=0)


TOO_MUCH = {
    "many topics": [b"\1%d" % number for number in range(MOST_SAID)],
    "in and out": [b"\1run", b"\0run"] * (MOST_SAID // 2),
    "nonsense": [b"\7%d" % number for number in range(MOST_SAID)],
    "a long topic": [b"\1" + b"x" * MOST_BYTES],
}


@pytest.mark.parametrize("said", TOO_MUCH.values(), ids=TOO_MUCH)
def test_who_says_too_much_is_hung_up_on(place: Place, said: list[bytes]) -> None:
    assert place.hangs_up_on(*said)


def test_who_names_a_few_topics_is_not(place: Place) -> None:
    assert not place.hangs_up_on(*(b"\1%d" % number for number in range(MOST_SAID - 1)))
    assert not place.hangs_up_on(b"\1" + b"x" * (MOST_BYTES - 1))


def test_who_comes_again_and_again_is_not_taken_for_one(place: Place) -> None:
    for _ in range(MOST_SAID + 2):
        with rawzmtp.shaken(place.address, b"SUB") as made:
            made.sendall(rawzmtp.framed(b"\1") + rawzmtp.framed(b"\1run"))
            made.settimeout(0.01)
            place.publish_until(lambda made=made: _hears(made))


def _hears(made: socket.socket) -> bool:
    try:
        return bool(made.recv(65536))
    except TimeoutError:
        return False
