"""A link's rate with both directions busy at once, over real connections."""

import socket
import threading

import pytest

from trainctl.protocol.machine.link_speed import exchange


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
