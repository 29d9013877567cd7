"""Which agent to talk to: the one that leads the active run, found by asking the agents of a cluster."""

import asyncio
from collections.abc import Sequence

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import (
    START_ONE,
    InvalidInputError,
    NotAuthorisedError,
    TrainctlError,
    UnreachableError,
)

LOOK_SECONDS = 3.0
"""Seconds the agents of a cluster have to answer whether they lead a run."""
GRACE_SECONDS = 0.5
"""Seconds left for the others once one has answered."""


def conducts(seen: m.Snapshot) -> bool:
    """Whether the agent that sent a snapshot leads an active run."""
    run = seen.run
    return run is not None and run.state in m.ACTIVE_RUN_STATES and run.lead == seen.node.node


def lead_address(seen: m.Snapshot) -> str | None:
    """The address of the lead of an active run, as another agent knows it; None if that agent can't reach it either."""
    run = seen.run
    if run is None or run.state not in m.ACTIVE_RUN_STATES:
        return None
    return next((peer.address for peer in seen.peers if peer.node == run.lead and peer.state != "silent"), None)


async def look(address: str, refused: list[TrainctlError] | None = None) -> m.Snapshot | None:
    """An agent's snapshot; None if it doesn't answer. If the keys don't fit, the error is added to `refused`."""
    try:
        async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
            return await client.snapshot(0)
    except TrainctlError as error:
        if refused is not None and isinstance(error, NotAuthorisedError | InvalidInputError):
            refused.append(error)
        return None


async def find_lead(addresses: Sequence[str]) -> str:
    """The address, of several agents', of the one that leads an active run, else of the first that answers. Raises
    UnreachableError if none answers."""
    refused: list[TrainctlError] = []
    looks = {address: asyncio.create_task(look(address, refused)) for address in addresses}
    found: dict[str, m.Snapshot] = {}
    pending: set[asyncio.Task[m.Snapshot | None]] = set(looks.values())
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=GRACE_SECONDS if found else None, return_when=asyncio.FIRST_COMPLETED
            )
            found |= {
                address: seen for address, task in looks.items() if task in done and (seen := task.result()) is not None
            }
            lead = next((address for address, seen in found.items() if conducts(seen)), None)
            if lead is not None:
                return lead
            if not done:
                break
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    if not found:
        raise _nobody(addresses, refused)
    told = (lead_address(seen) for seen in found.values())
    return next((lead for lead in told if lead), None) or next(address for address in addresses if address in found)


async def find_run(addresses: Sequence[str], run: str) -> str:
    """The address, of several agents', of one that knows a run: of the node that led it last if it answers, else as
    `find_lead`. Raises UnreachableError if none answers."""

    async def knows(address: str) -> tuple[bool, bool]:
        """Whether the agent knows the run, and has led it."""
        try:
            async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
                found = [known for known in (await client.runs()).runs if known.run == run]
                led = bool(found) and found[0].lead == (await client.snapshot(0)).node.node
                return bool(found), led
        except TrainctlError:
            return False, False

    knowing = dict(zip(addresses, await asyncio.gather(*map(knows, addresses)), strict=True))
    best = max(addresses, key=lambda address: knowing[address])
    return best if knowing[best][0] else await find_lead(addresses)


async def find_any(addresses: Sequence[str]) -> str:
    """The first of several agents' addresses at which one answers. Raises UnreachableError if none does."""
    refused: list[TrainctlError] = []
    looks = await asyncio.gather(*(look(address, refused) for address in addresses))
    found = next((address for address, seen in zip(addresses, looks, strict=True) if seen is not None), None)
    if found is None:
        raise _nobody(addresses, refused)
    return found


def _nobody(addresses: Sequence[str], refused: list[TrainctlError]) -> TrainctlError:
    """Why none of several agents has answered: the keys don't fit, or none is there."""
    if refused:
        return refused[0]
    return UnreachableError(f"no agent of the cluster responds: {', '.join(addresses)}; {START_ONE}")
