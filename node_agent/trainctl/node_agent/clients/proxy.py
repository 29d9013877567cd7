"""A proxy for runs that this node led but no longer takes part in: their state comes from their present lead."""

import asyncio
from collections.abc import Iterable
from typing import Protocol

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Client
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.security.keyring import Keyring

ANSWER_SECONDS = 2.0
"""Seconds the other agent may take to answer; the client of this one waits longer."""


class RunsSource(Protocol):
    """What is seen of the agent."""

    @property
    def keys(self) -> Keyring | None: ...
    def led_elsewhere(self, run: str) -> str | None: ...
    def address_of(self, node: str) -> str | None: ...
    def peer_views(self) -> tuple[m.PeerView, ...]: ...


async def view(known: m.RunView, source: RunsSource) -> m.RunView:
    """A run as its lead of now has it; where that can't be reached, as it was when it was handed over."""
    lead = source.led_elsewhere(known.run)
    if lead is None:
        return known
    reached = _reached(lead, source)
    if reached is not None:
        try:
            async with Client(reached, timeout_seconds=ANSWER_SECONDS, keys=source.keys) as client:
                told = (await client.snapshot(0, known.run)).run
        except TrainctlError:
            told = None
        if told is not None:
            return msgspec.structs.replace(told, directory=known.directory)
    reason = f"the run's lead {lead} is unreachable, so the run's state is unknown here"
    return msgspec.structs.replace(known, lead=lead, reason=reason)


async def summaries(rows: Iterable[m.RunSummary], source: RunsSource) -> list[m.RunSummary]:
    """The same rows, those of runs led elsewhere as they are there; stale ones where that can't be told."""
    rows = list(rows)
    leads = {row.run: lead for row in rows if (lead := source.led_elsewhere(row.run)) is not None}
    nodes = sorted(set(leads.values()))
    told = dict(zip(nodes, await asyncio.gather(*(_runs_of(node, source) for node in nodes)), strict=True))
    return [_as_told(row, leads[row.run], told[leads[row.run]]) if row.run in leads else row for row in rows]


def _as_told(row: m.RunSummary, lead: str, told: dict[str, m.RunSummary]) -> m.RunSummary:
    there = told.get(row.run)
    if there is None:
        return msgspec.structs.replace(row, lead=lead, stale=True)
    return msgspec.structs.replace(there, directory=row.directory, name=row.name, size_bytes=row.size_bytes)


async def _runs_of(node: str, source: RunsSource) -> dict[str, m.RunSummary]:
    address = _reached(node, source)
    if address is None:
        return {}
    try:
        async with Client(address, timeout_seconds=ANSWER_SECONDS, keys=source.keys) as client:
            return {row.run: row for row in (await client.runs()).runs}
    except TrainctlError:
        return {}


def _reached(node: str, source: RunsSource) -> str | None:
    """Where an agent that is connected takes requests."""
    in_touch = any(peer.node == node and peer.state == "connected" for peer in source.peer_views())
    return source.address_of(node) if in_touch else None
