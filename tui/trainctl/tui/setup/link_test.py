"""How good the link to another node's agent is: round trips over its socket, and one TCP stream to its address."""

import asyncio
import json
import secrets
import socket
import statistics
import subprocess
import time
from typing import NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.config import addresses
from trainctl.protocol.errors import UnreachableError
from trainctl.protocol.security.keyring import Keyring
from trainctl.tui.doctor.probe import ask_round
from trainctl.tui.setup.ssh import Ssh, said

ROUNDS = 20
ANSWER_SECONDS, AWAIT_SECONDS = 3.0, 30.0
STREAM_SECONDS = 10.0
_CHUNK_BYTES = 1 << 20


class Link(NamedTuple):
    """What was measured."""

    facts: m.Facts
    round_trip_seconds: float  # median
    bytes_per_second: float | None  # of one TCP stream from there to here; None: none came about
    why: str = ""  # there is none


def test(ssh: Ssh, python: str, address: str, ring: Keyring) -> Link:
    """Waits for the agent. Raises UnreachableError, NotAuthorisedError."""
    facts, trip_seconds = asyncio.run(_answers(address, ring))
    host = addresses.split(address).hostname or ""
    try:
        rate, why = _stream(ssh, python, host), ""
    except (OSError, ValueError) as error:
        rate, why = None, str(error) or type(error).__name__
    return Link(facts, trip_seconds, rate, why)


async def _answers(address: str, ring: Keyring) -> tuple[m.Facts, float]:
    deadline = time.monotonic() + AWAIT_SECONDS
    while True:
        try:
            async with Client(address, timeout_seconds=ANSWER_SECONDS, keys=ring) as client:
                asked = [await ask_round(client) for _ in range(ROUNDS)]
            return asked[-1][1], statistics.median(one.trip_seconds for one, _ in asked)
        except UnreachableError as error:
            if time.monotonic() > deadline:
                raise UnreachableError(f"{error} (for {AWAIT_SECONDS:g} s)") from None
            await asyncio.sleep(0.2)


def _stream(ssh: Ssh, python: str, host: str) -> float:
    """Bytes a second that one plain TCP connection to that address carries. Raises OSError or ValueError."""
    token = secrets.token_hex(16)
    command = ssh.command([python, "-m", "trainctl.tui.setup.remote_side", "stream"])
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as sender:
        assert sender.stdin is not None and sender.stdout is not None and sender.stderr is not None
        try:
            sender.stdin.write(json.dumps({"host": host, "token": token}).encode())
            sender.stdin.close()
            line = sender.stdout.readline()
            if not line:
                raise ValueError(said(sender.stderr.read().decode("utf-8", "replace")))
            return _received(host, json.loads(line)["port"], token)
        finally:
            sender.terminate()


def _received(host: str, port: int, token: str) -> float:
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(STREAM_SECONDS)
        connection.sendall(token.encode())
        buffer, received, began = bytearray(_CHUNK_BYTES), 0, time.monotonic()
        while count := connection.recv_into(buffer):
            received += count
        seconds = time.monotonic() - began
    if not received:
        raise ValueError("no data arrived")
    return received / max(seconds, 1e-9)
