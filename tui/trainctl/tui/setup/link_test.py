"""How good the link to another node's agent is: round trips over its socket, and its rate with both directions busy."""

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
from trainctl.protocol.machine.speeds import exchange
from trainctl.protocol.security.keyring import Keyring
from trainctl.tui.doctor.probe import ask_round
from trainctl.tui.setup.ssh import Ssh, said

ROUNDS = 20
ANSWER_SECONDS, AWAIT_SECONDS = 3.0, 30.0
STREAM_SECONDS = 10.0


class Link(NamedTuple):
    """What was measured."""

    facts: m.Facts
    round_trip_seconds: float  # median
    bytes_per_second: float | None  # from there to here, over one TCP connection; None: not measured
    why: str = ""  # it isn't measured
    sent_bytes_per_second: float | None = None  # from here to there, at the same time


def test(ssh: Ssh, python: str, address: str, ring: Keyring) -> Link:
    """Waits for the agent. Raises UnreachableError, NotAuthorisedError."""
    facts, trip_seconds = asyncio.run(_answers(address, ring))
    host = addresses.host(address)
    try:
        received, sent = _exchange(ssh, python, host)
    except (OSError, ValueError) as error:
        return Link(facts, trip_seconds, None, str(error) or type(error).__name__)
    return Link(facts, trip_seconds, received, "", sent)


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


def _exchange(ssh: Ssh, python: str, host: str) -> tuple[float, float]:
    """Bytes per second that one plain TCP connection to that address carries from there and to there, both directions
    at once. Raises OSError or ValueError."""
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
            received = _received(host, json.loads(line)["port"], token)
            return received, json.loads(sender.stdout.readline())["bytes_per_second"]
        finally:
            sender.terminate()


def _received(host: str, port: int, token: str) -> float:
    with socket.create_connection((host, port), timeout=5) as connection:
        connection.settimeout(STREAM_SECONDS)
        connection.sendall(token.encode())
        return exchange(connection)
