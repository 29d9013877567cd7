"""A link's rate with both directions busy at once, over real connections."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainctl.protocol.machine.speeds import ROUNDS, echo, exchange, round_trip

Ends = tuple[socket.socket, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as near:
        far, _ = server.accept()
        with far:
            yield near, far


def received(connection: socket.socket) -> int:
    return sum(len(part) for part in iter(lambda: connection.recv(1 << 20), b""))


def test_both_directions_are_measured_at_once(ends: Ends) -> None:
    with ThreadPoolExecutor(2) as threads:
        assert min(threads.map(lambda end: exchange(end, 0.3), ends)) > 0


def test_a_side_sends_and_receives_no_more_than_its_bound(ends: Ends) -> None:
    near, far = ends
    most = 3_000_001

    def send_until_closed() -> None:
        while True:
            far.sendall(bytes(1 << 20))

    with ThreadPoolExecutor(2) as threads:
        sent, counted = threads.submit(send_until_closed), threads.submit(received, far)
        assert exchange(near, 60, most) > 0  # the bound ends it, not the time
        assert counted.result() == most
        near.close()
        assert isinstance(sent.exception(), OSError)


def test_a_round_trip_is_timed_and_ends_with_its_last_byte(ends: Ends) -> None:
    near, far = ends
    with ThreadPoolExecutor(1) as threads:
        echoed = threads.submit(echo, far)
        assert round_trip(near) > 0
        echoed.result()
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(ROUNDS)
    far.close()
    with pytest.raises(OSError):
        round_trip(near)


def test_silence_is_no_rate(ends: Ends) -> None:
    near, far = ends
    far.shutdown(socket.SHUT_WR)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(received, far)
        with pytest.raises(ValueError, match="no data arrived"):
            exchange(near, 0.1)
        near.close()
