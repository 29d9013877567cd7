"""Addresses: what may be listened on, and what is none."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import zmq

from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError


def test_a_unix_socket_needs_no_keys_and_loopback_only_the_wish_for_none() -> None:
    addresses.check_bind("ipc:///tmp/a.sock", keys=False)
    for address in ("tcp://127.8.9.1:0", "tcp://localhost:1", "tcp://[::1]:7474"):
        with pytest.raises(InvalidInputError, match=r"TCP needs keys: .*keys new.*keys authorize.*Unix.*--no-keys"):
            addresses.check_bind(address, keys=False)
        addresses.check_bind(address, keys=False, no_keys=True)


def test_nothing_else_can_without_keys_and_with_keys_only_one_address() -> None:
    everywhere = ("0.0.0.0", "*", "[::]")
    single = ("192.168.1.4", "studio.local", "127.0.0.1.example.org", "2130706433", "eth0")
    for host in everywhere + single:
        with pytest.raises(InvalidInputError, match=r"TCP needs keys: .*keys new .*keys authorize NAME KEY$"):
            addresses.check_bind(f"tcp://{host}:7474", keys=False, no_keys=host in single)
    for host in single:
        addresses.check_bind(f"tcp://{host}:7474", keys=True)
    for host in everywhere:
        with pytest.raises(InvalidInputError, match="the address that other"):
            addresses.check_bind(f"tcp://{host}:7474", keys=True)


@pytest.mark.parametrize("call", [addresses.split, partial(addresses.check_bind, keys=True)])
def test_what_is_no_address_is_told_what_one_looks_like(call: Callable[[str], object]) -> None:
    for address in (
        "", "7474", "127.0.0.1:7474", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:70000", "udp://127.0.0.1:7474", "ipc://", "ipc://@a", "ipc://a.sock", "ipc://*", "ipc:///",
        "inproc://a", "http://127.0.0.1:80",
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="tcp://host:port"):
            call(address)


def test_a_path_that_fits_no_unix_socket_is_refused(tmp_path: Path) -> None:
    longest = "ipc://" + str(tmp_path / "s").ljust(addresses.MAX_PATH_BYTES, "s")
    addresses.split(longest)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.bind(addresses.live_beside(longest))
    with pytest.raises(InvalidInputError, match="choose a shorter one"):
        addresses.split(f"{longest}s")
