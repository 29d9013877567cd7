"""Which agent to talk to: the one that leads the active run, found by asking the agents of a cluster."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import (
    START_ONE,
    InvalidInputError,
    NotConnectedError,
    TrainctlError,
    UnreachableError,
)

LOOK_SECONDS = 3.0
"""Seconds the agents of a cluster have to answer whether they lead a run."""
GRACE_SECONDS = 0.5
"""Seconds left for the others once one has answered."""


class SeveralRunsError(InvalidInputError):
    """A run must be named, because several are active."""

    def __init__(self, where: str, problem: str, leads: dict[str, str]) -> None:
        super().__init__(where, problem)
        self.leads = leads  # address of each run's lead, by the run's ID


def conducts(seen: m.Snapshot) -> bool:
    """Whether the agent that sent a snapshot leads an active run."""
    run = seen.run
    if run is None or run.kind != "hosted":
        return False
    return run.state in m.ACTIVE_RUN_STATES and run.lead == seen.node.node


def lead_address(seen: m.Snapshot) -> str | None:
    """The address of the lead of an active run, as another agent knows it; None if that agent can't reach it either."""
    run = seen.run
    if run is None or run.state not in m.ACTIVE_RUN_STATES:
        return None
    return next((peer.address for peer in seen.peers if peer.node == run.lead and peer.state != "silent"), None)


async def look(address: str, refused: list[TrainctlError] | None = None) -> m.Snapshot | None:
    """An agent's snapshot; None if it doesn't answer. Why, if there is something, is added to `refused`."""
    try:
        async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
            return await client.snapshot(0)
    except TrainctlError as error:
        if refused is not None and not isinstance(error, NotConnectedError):
            refused.append(error)
        return None


async def find_lead(addresses: Sequence[str]) -> str:
    """Return the address, of several agents', of the one that leads an active run, else of the first that answers.
    Raises UnreachableError if none answers, and InvalidInputError if several runs are active."""
    found = await _answers(addresses)
    leads = _leads(found)
    if len(leads) > 1:
        raise SeveralRunsError("RUN", f"several runs are active: {', '.join(sorted(leads))}; name one of them", leads)
    return next(iter(leads.values()), None) or next(iter(found))


def _leads(found: Mapping[str, m.Snapshot]) -> dict[str, str]:
    """Return the address of the lead of each active run by the run's ID, also where only a follower has answered; its
    own if it can't reach the lead either."""
    leads: dict[str, str] = {}
    for address, seen in sorted(found.items(), key=lambda item: conducts(item[1])):
        if seen.run is not None and seen.run.kind == "hosted" and seen.run.state in m.ACTIVE_RUN_STATES:
            leads[seen.run.run] = address if conducts(seen) else lead_address(seen) or address
    return leads


async def _answers(addresses: Sequence[str]) -> dict[str, m.Snapshot]:
    """Return the snapshots of the agents that answer soon after the first, in the order of their addresses. Raises
    UnreachableError if none does."""
    refused: list[TrainctlError] = []
    looks = {address: asyncio.create_task(look(address, refused)) for address in addresses}
    pending: set[asyncio.Task[m.Snapshot | None]] = set(looks.values())
    has_answer = False
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=GRACE_SECONDS if has_answer else None, return_when=asyncio.FIRST_COMPLETED
            )
            has_answer = has_answer or any(task.result() is not None for task in done)
            if not done:
                break
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    ended = ((address, task.result()) for address, task in looks.items() if task not in pending)
    found = {address: seen for address, seen in ended if seen is not None}
    if not found:
        raise _nobody(addresses, refused)
    return found


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
    if knowing[best][0]:
        return best
    try:
        return await find_lead(addresses)
    except SeveralRunsError as several:
        raise InvalidInputError("RUN", f"no agent knows {run}; active: {', '.join(several.leads)}") from None


async def all_runs(addresses: Sequence[str]) -> tuple[m.RunSummary, ...]:
    """Return the runs that several agents know, newest first, each as its lead has it if that answers, with the space
    that it takes on all of them. Raises UnreachableError if none answers."""
    found: dict[str, m.RunSummary] = {}
    sizes: dict[str, int] = {}

    async def ask(address: str, node: str) -> None:
        with contextlib.suppress(TrainctlError):
            async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
                for row in (await client.runs()).runs:
                    sizes[row.run] = sizes.get(row.run, 0) + (row.size_bytes or 0)
                    if row.run not in found or row.lead == node:
                        found[row.run] = row

    answers = await _answers(addresses)
    await asyncio.gather(*(ask(address, seen.node.node) for address, seen in answers.items()))
    rows = (msgspec.structs.replace(row, size_bytes=sizes[row.run]) for row in found.values())
    return tuple(sorted(rows, key=lambda row: row.started_at, reverse=True))


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
    for error in sorted(refused, key=lambda error: isinstance(error, UnreachableError)):
        return error
    return UnreachableError(f"no agent of the cluster responds: {', '.join(addresses)}; {START_ONE}")
