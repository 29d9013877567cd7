"""A link's rate with both directions busy at once, over real connections."""

import contextlib
import socket
import threading

import pytest

from trainctl.protocol.machine.link_speed import ROUNDS, echo, exchange, round_trip


def both(seconds=0.3):
    """The rates that the two ends of a connection measure."""
    found = {}
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()

        def far():
            with other:
                found["far"] = exchange(other, seconds)

        thread = threading.Thread(target=far)
        thread.start()
        found["near"] = exchange(one, seconds)
        thread.join(30)
    return found


def test_both_directions_are_measured_at_once():
    found = both()
    assert min(found.values()) > 1e6, found


def test_a_side_sends_and_receives_no_more_than_its_bound():
    most, counts = 3_000_001, []
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            endless = threading.Thread(target=send_until_closed, args=(other,))
            endless.start()
            counting = threading.Thread(target=lambda: counts.append(count(other)))
            counting.start()
            assert exchange(one, 60, most) > 0  # the bound ends it, not the time
            counting.join(30)
            assert counts == [most]
            one.close()
            endless.join(30)
            assert not endless.is_alive()


def send_until_closed(connection):
    with contextlib.suppress(OSError):
        while True:
            connection.sendall(bytes(1 << 20))


def count(connection):
    return sum(len(part) for part in iter(lambda: connection.recv(1 << 20), b""))


def test_a_round_trip_is_timed_and_ends_with_its_last_byte():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        with other:
            echoing = threading.Thread(target=echo, args=(other,))
            echoing.start()
            assert 0 < round_trip(one) < 1
            echoing.join(30)
            other.setblocking(False)
            with pytest.raises(BlockingIOError):
                other.recv(ROUNDS)
            other.close()
            with pytest.raises(OSError):
                round_trip(one)


def test_one_that_says_nothing_is_no_rate():
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as one:
        other, _ = server.accept()
        other.shutdown(socket.SHUT_WR)
        drain = threading.Thread(target=lambda: [None for _ in iter(lambda: other.recv(1 << 20), b"")])
        drain.start()
        with pytest.raises(ValueError, match="no data arrived"):
            exchange(one, 0.1)
        drain.join(30)
        other.close()
