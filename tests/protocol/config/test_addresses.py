"""Addresses: what may be listened on, and what is none."""

from collections.abc import Callable

import pytest

from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError


def test_loopback_can_be_listened_on() -> None:
    for address in ("tcp://127.8.9.1:0", "tcp://localhost:1", "tcp://[::1]:7474", "ipc:///tmp/a.sock"):
        addresses.check_bind(address)


def test_nothing_else_can_without_keys_and_with_keys_only_one_address() -> None:
    everywhere = ("0.0.0.0", "*", "[::]")
    single = ("192.168.1.4", "studio.local", "127.0.0.1.example.org", "2130706433", "eth0")
    for host in everywhere + single:
        with pytest.raises(InvalidInputError, match=r"only listen on loopback.*keys new; trainctl keys authorize"):
            addresses.check_bind(f"tcp://{host}:7474")
    for host in single:
        addresses.check_bind(f"tcp://{host}:7474", keys=True)
    for host in everywhere:
        with pytest.raises(InvalidInputError, match="the address that other"):
            addresses.check_bind(f"tcp://{host}:7474", keys=True)


@pytest.mark.parametrize("call", [addresses.split, addresses.check_bind])
def test_what_is_no_address_is_told_what_one_looks_like(call: Callable[[str], object]) -> None:
    for address in (
        "", "7474", "127.0.0.1:7474", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
        "tcp://127.0.0.1:70000", "udp://127.0.0.1:7474", "ipc://", "inproc://a", "http://127.0.0.1:80",
    ):  # fmt: skip
        with pytest.raises(InvalidInputError, match="tcp://host:port"):
            call(address)
