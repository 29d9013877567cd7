"""Loopback ports of the agents of tests, which keep theirs when they are started again."""

import itertools
import os
import socket
from collections.abc import Iterator

PORTS = range(20_000, 32_000, 2)
"""Below the ports that systems give to outgoing connections."""
WORKERS = 8
"""The number of ranges of ports: each test worker has one."""


def free_addresses(count: int) -> list[str]:
    """Loopback addresses for agents that nothing listens at, none of them given out twice."""
    return [f"tcp://127.0.0.1:{next(FREE_PORTS)}" for _ in range(count)]


def _free_ports() -> Iterator[int]:
    """Each test worker has a range of its own, so that none takes what another has chosen and not bound yet; it begins
    anywhere in it, for another suite on this machine has the same range."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:]) % WORKERS
    ports = PORTS[worker::WORKERS]
    start = os.getpid() % len(ports)
    rotated = [*ports[start:], *ports[:start]]
    return (port for port in itertools.cycle(rotated) if _are_free(port, port + 1))


def _are_free(*ports: int) -> bool:
    try:
        for port in ports:
            socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


FREE_PORTS = _free_ports()
