"""What each node says of itself: its agent if that answers, else its folder on this machine."""

import asyncio
from collections.abc import Mapping
from typing import NamedTuple

from trainctl.protocol import messages as m
from trainctl.protocol.calibration import profile_file
from trainctl.protocol.calibration.profile import DeviceProfile
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import TrainctlError, UnreachableError
from trainctl.protocol.record.paths import node_directory
from trainctl.tui.doctor.probe import try_port

ANSWER_SECONDS = 15.0
"""Time that an agent that listens has for each answer; it may be on a busy machine."""
MOST_PROFILES = 32
"""Newest profiles of a node that are looked at: the most that an agent gives."""


class NodeLook(NamedTuple):
    """One node; None: not known."""

    profiles: tuple[DeviceProfile, ...] = ()  # newest first
    facts: m.Facts | None = None
    host: m.HostReading | None = None
    problem: str = ""  # why its agent says nothing


async def look_at(addresses: Mapping[str, str | None]) -> dict[str, NodeLook]:
    """All nodes at once. A node without an address has its folder on this machine only."""
    found = await asyncio.gather(*(_look(node, address) for node, address in addresses.items()))
    return dict(zip(addresses, found, strict=True))


async def _look(node: str, address: str | None) -> NodeLook:
    problem = "no profile of it is on this machine"
    try:
        if address is not None:
            return await _asked(address)
    except TrainctlError as error:
        problem = f"{problem}, and its agent: {error}"
    stored = profile_file.all_stored(node_directory(node) / "profiles")
    return NodeLook(tuple(reversed(stored)), problem=problem)


async def _asked(address: str) -> NodeLook:
    """Raises TrainctlError if the agent doesn't answer: at once if nothing listens there."""
    trouble = await try_port(address)
    if trouble is not None:
        raise UnreachableError(f"{address}: {trouble.text}")
    async with Client(address, timeout_seconds=ANSWER_SECONDS) as client:
        host = (await client.snapshot(0)).node.host
        profiles = (await client.profiles(MOST_PROFILES)).profiles
        return NodeLook(profiles, await client.facts(), host)
