"""One call to an agent from a subcommand. ZeroMQ loads with the first call, not for `--help`."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from trainctl.protocol import messages as m
from trainctl.tui.state import rank_speed

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

LOOKS, AGAIN_SECONDS = 5, 0.05
"""How often, and how soon again, one looks for a step that all ranks have reported."""
ANSWER_SECONDS = 5.0
"""How long the first answer to anything may take."""
T = TypeVar("T")


def call(
    address: str, work: "Callable[[Client], Awaitable[T]]", *, answer_seconds: float | None = None, lead: bool = False
) -> T:
    """Run `work` with a client connected to `address`. With `lead`, an agent that only hosts a rank is replaced by the
    active run's lead. The client's exceptions are passed on."""
    from trainctl.protocol.client.client import Client
    from trainctl.protocol.client.cluster import lead_address

    seconds = answer_seconds or ANSWER_SECONDS

    async def connected() -> T:
        async with Client(address, timeout_seconds=seconds) as client:
            elsewhere = lead_address(await client.snapshot(0)) if lead else None
            if elsewhere is None:
                return await work(client)
        async with Client(elsewhere, timeout_seconds=seconds) as client:
            return await work(client)

    return asyncio.run(connected())


def call_all(addresses: Mapping[str, str], work: "Callable[[Mapping[str, Client]], Awaitable[T]]") -> T:
    """Run `work` with a client connected to each address, by the same names. The clients' exceptions are passed on."""
    from trainctl.protocol.client.client import Client

    async def connected() -> T:
        async with contextlib.AsyncExitStack() as stack:
            clients = {
                name: await stack.enter_async_context(Client(address, timeout_seconds=ANSWER_SECONDS))
                for name, address in addresses.items()
            }
            return await work(clients)

    return asyncio.run(connected())


def find_lead(addresses: Sequence[str], run: str | None = None) -> str:
    """Call `lead.find_lead`, or `lead.find_run` if a run is given. A single address is returned without asking it."""
    if len(addresses) == 1:
        return addresses[0]
    from trainctl.protocol.client import cluster

    return asyncio.run(cluster.find_lead(addresses) if run is None else cluster.find_run(addresses, run))


def all_runs(addresses: Sequence[str], seconds: float = ANSWER_SECONDS) -> tuple[m.RunSummary, ...]:
    """Call `lead.all_runs`. A single agent has so many seconds to answer; one that only hosts a rank is replaced by the
    active run's lead."""
    if len(addresses) == 1:
        return call(addresses[0], lambda client: client.runs(), answer_seconds=seconds, lead=True).runs
    from trainctl.protocol.client import cluster

    return asyncio.run(cluster.all_runs(addresses))


def find_any(addresses: Sequence[str]) -> str:
    """Call `lead.find_any`."""
    from trainctl.protocol.client import cluster

    return asyncio.run(cluster.find_any(addresses))


async def settled_snapshot(client: "Client", run: str | None) -> m.Snapshot:
    """A snapshot in which all ranks that report have reported one step, if one comes within a few looks."""
    for _ in range(LOOKS):
        snapshot = await client.snapshot(0, run)
        view = snapshot.run
        if view is None or view.state != "running" or rank_speed.same_step(view.ranks, snapshot.rank_steps):
            break
        await asyncio.sleep(AGAIN_SECONDS)
    return snapshot


async def hosts_of(peers: Sequence[m.PeerView]) -> dict[str, m.HostReading]:
    """What the other nodes' agents read of their machines now; those that don't answer are left out."""
    from trainctl.protocol.client.cluster import look

    reached = [peer for peer in peers if peer.state != "unknown"]
    seen = await asyncio.gather(*(look(peer.address) for peer in reached))
    return {
        peer.node: snapshot.node.host
        for peer, snapshot in zip(reached, seen, strict=True)
        if snapshot is not None and snapshot.node.host is not None
    }
