"""Addresses: what may be listened on, and what is none."""

import pytest

from trainctl.protocol.config import addresses
from trainctl.protocol.errors import InvalidInputError


@pytest.mark.parametrize(
    "address",
    ["tcp://127.8.9.1:0", "tcp://localhost:1", "tcp://[::1]:7474", "ipc:///tmp/a.sock"],
)
def test_loopback_can_be_listened_on(address: str) -> None:
    addresses.check_bind(address)


@pytest.mark.parametrize(
    "address",
    [
        "tcp://0.0.0.0:7474", "tcp://*:7474", "tcp://192.168.1.4:7474", "tcp://[::]:7474", "tcp://studio.local:7474",
        "tcp://127.0.0.1.example.org:7474", "tcp://2130706433:7474", "tcp://eth0:7474",
    ],
)  # fmt: skip
def test_nothing_else_can_without_keys(address: str) -> None:
    with pytest.raises(InvalidInputError, match="only listen on loopback"):
        addresses.check_bind(address)


@pytest.mark.parametrize(
    "address",
    ["", "7474", "127.0.0.1:7474", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:", "tcp://127.0.0.1:x",
     "tcp://127.0.0.1:70000", "udp://127.0.0.1:7474", "ipc://", "inproc://a", "http://127.0.0.1:80"],
)  # fmt: skip
def test_what_is_no_address_is_told_what_one_looks_like(address: str) -> None:
    for call in (addresses.split, addresses.check_bind):
        with pytest.raises(InvalidInputError, match="tcp://host:port"):
            call(address)
