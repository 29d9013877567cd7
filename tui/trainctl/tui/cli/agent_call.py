"""One call to an agent from a command: the connection around it, and a command followed to its end."""

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainctl.protocol import messages as m
from trainctl.protocol.errors import (
    START_ONE,
    ExpiredError,
    InvalidInputError,
    NotAuthorisedError,
    RefusedError,
    TrainctlError,
    UnreachableError,
)
from trainctl.protocol.messages import verbs
from trainctl.tui.state import rank_speed

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

LOOK_SECONDS = 3.0
"""How long the agents of a cluster have to say whether they conduct a run."""
GRACE_SECONDS = 0.5
"""What the others still have once one has answered."""
LOOKS, AGAIN_SECONDS = 5, 0.05
"""How often, and how soon again, one looks for a step that all ranks have reported."""
DEFAULT_ADDRESS = "tcp://127.0.0.1:7474"
"""Where an agent listens by default: `sockets.DEFAULT_PORT`, without loading ZeroMQ to say so."""
ANSWER_SECONDS = 5.0
"""How long the first answer to anything may take."""
Wait = Literal["applied", "accepted", "none"]
T = TypeVar("T")


def call(
    address: str, work: "Callable[[Client], Awaitable[T]]", *, answer_seconds: float | None = None, lead: bool = False
) -> T:
    """`work` with a connected client, to its end; with `lead`, one of the agent that conducts the active run, where the
    one at `address` only hosts a rank of it. Raises as the client does."""
    from trainctl.protocol.client.client import Client  # ZeroMQ: not for `--help`

    seconds = answer_seconds or ANSWER_SECONDS

    async def connected() -> T:
        async with Client(address, timeout_seconds=seconds) as client:
            elsewhere = _told_lead(await client.snapshot(0)) if lead else None
            if elsewhere is None:
                return await work(client)
        async with Client(elsewhere, timeout_seconds=seconds) as client:
            return await work(client)

    return asyncio.run(connected())


def find_lead(addresses: Sequence[str]) -> str:
    """The address, of several agents', to talk to: of the one that conducts an active run, else of the first that
    answers. One alone isn't asked. Raises UnreachableError if none answers."""
    return addresses[0] if len(addresses) == 1 else asyncio.run(_find_lead(addresses))


def find_run(addresses: Sequence[str], run: str) -> str:
    """The address, of several agents', of one that knows a run: of the node that led it last where that is in reach,
    else as `find_lead`. Raises UnreachableError if none answers."""
    if len(addresses) == 1:
        return addresses[0]

    async def knows(address: str) -> tuple[bool, bool]:
        """Whether the agent knows the run, and has led it."""
        from trainctl.protocol.client.client import Client

        try:
            async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
                found = [known for known in (await client.runs()).runs if known.run == run]
                led = bool(found) and found[0].lead == (await client.snapshot(0)).node.node
                return bool(found), led
        except TrainctlError:
            return False, False

    async def look() -> list[tuple[bool, bool]]:
        return await asyncio.gather(*map(knows, addresses))

    knowing = dict(zip(addresses, asyncio.run(look()), strict=True))
    best = max(addresses, key=lambda address: knowing[address])
    return best if knowing[best][0] else find_lead(addresses)


def find_any(addresses: Sequence[str]) -> str:
    """The first of several agents' addresses at which one answers. Raises UnreachableError if none does."""

    async def look() -> list[m.Snapshot | None]:
        return await asyncio.gather(*(_look(address, refused) for address in addresses))

    refused: list[TrainctlError] = []
    found = next((at for at, seen in zip(addresses, asyncio.run(look()), strict=True) if seen is not None), None)
    if found is None:
        raise _nobody(addresses, refused)
    return found


async def _find_lead(addresses: Sequence[str]) -> str:
    refused: list[TrainctlError] = []
    looks = {address: asyncio.create_task(_look(address, refused)) for address in addresses}
    found: dict[str, m.Snapshot] = {}
    pending: set[asyncio.Task[m.Snapshot | None]] = set(looks.values())
    try:
        while pending:
            done, pending = await asyncio.wait(
                pending, timeout=GRACE_SECONDS if found else None, return_when=asyncio.FIRST_COMPLETED
            )
            found |= {
                address: seen for address, look in looks.items() if look in done and (seen := look.result()) is not None
            }
            lead = next((address for address, seen in found.items() if _conducts(seen)), None)
            if lead is not None:
                return lead
            if not done:
                break
    finally:
        for look in pending:
            look.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    if not found:
        raise _nobody(addresses, refused)
    told = (_told_lead(seen) for seen in found.values())
    return next((lead for lead in told if lead), None) or next(address for address in addresses if address in found)


async def _look(address: str, refused: list[TrainctlError] | None = None) -> m.Snapshot | None:
    """What an agent says; None if it says nothing, and where that is for want of keys, why it doesn't in `refused`."""
    from trainctl.protocol.client.client import Client

    try:
        async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
            return await client.snapshot(0)
    except TrainctlError as error:
        if refused is not None and isinstance(error, NotAuthorisedError | InvalidInputError):
            refused.append(error)
        return None


def _nobody(addresses: Sequence[str], refused: list[TrainctlError]) -> TrainctlError:
    """None of several agents has answered: for want of keys, or because none is there."""
    if refused:
        return refused[0]
    return UnreachableError(f"no agent of the cluster answers: {', '.join(addresses)}; {START_ONE}")


def _conducts(seen: m.Snapshot) -> bool:
    run = seen.run
    return run is not None and run.state in m.ACTIVE_RUN_STATES and run.lead == seen.node.node


def _told_lead(seen: m.Snapshot) -> str | None:
    """Where the lead of an active run is, as another agent tells it; None if that can't reach it either."""
    run = seen.run
    if run is None or run.state not in m.ACTIVE_RUN_STATES:
        return None
    return next((peer.address for peer in seen.peers if peer.node == run.lead and peer.state != "silent"), None)


async def settled_snapshot(client: "Client", run: str | None) -> m.Snapshot:
    """A snapshot in which all ranks that report have reported one step, if one comes within a few looks; they don't
    report all at once."""
    for _ in range(LOOKS):
        snapshot = await client.snapshot(0, run)
        view = snapshot.run
        if view is None or view.state != "running" or rank_speed.same_step(view.ranks, snapshot.rank_steps):
            break
        await asyncio.sleep(AGAIN_SECONDS)
    return snapshot


async def hosts_of(peers: Sequence[m.PeerView]) -> dict[str, m.HostReading]:
    """What the other nodes' agents read of their machines now; those that don't answer are left out."""
    reached = [peer for peer in peers if peer.state != "unknown"]
    seen = await asyncio.gather(*(_look(peer.address) for peer in reached))
    return {
        peer.node: snapshot.node.host
        for peer, snapshot in zip(reached, seen, strict=True)
        if snapshot is not None and snapshot.node.host is not None
    }


@dataclass(frozen=True)
class Order:
    """A command ready to be sent, checked as far as that can be done here."""

    verb: str
    args: Mapping[str, Any] = field(default_factory=dict)
    node: str | None = None
    run: str | None = None
    if_plan: int | None = None
    id: str | None = None  # None: the client makes one
    ttl_seconds: float = 60.0

    @property
    def options(self) -> dict[str, Any]:
        """All but the verb and its arguments, as the client takes them."""
        names = ("node", "run", "if_plan", "id", "ttl_seconds")
        return {name: getattr(self, name) for name in names}


def make_order(verb: str, args: dict[str, Any], *, id: str | None = None, **options: Any) -> Order:
    """An order with an id of its own unless one is given. Raises InvalidInputError naming what is wrong."""
    verbs.check(verb, args, options.get("node"))
    if (options.get("if_plan") or 0) >= 2**63:
        raise InvalidInputError("--if-plan", "no plan version is that large")
    return Order(verb, args, id=_checked_id(id) if id is not None else str(uuid.uuid4()), **options)


async def send(client: "Client", order: Order, wait: Wait, timeout_seconds: float) -> m.CommandReply:
    """The last reply that `wait` asks for.

    Raises ExpiredError when an accepted command hasn't ended within the timeout, UnreachableError when nothing answers.
    """
    verb, args = order.verb, dict(order.args)
    if wait == "none":
        return await _hand_over(client, order)
    replies: Any = client.command(verb, args, **order.options)
    async with contextlib.aclosing(replies):
        first: m.CommandReply = await anext(replies)
        if wait == "accepted" or first.state in m.FINAL_COMMAND_STATES:
            return first
        try:
            async with asyncio.timeout(timeout_seconds):
                last: m.CommandReply = await anext(replies)
                return last
        except TimeoutError:
            raise ExpiredError(
                f"{verb}: accepted, not applied within {timeout_seconds:g} s; "
                f"the same call with --id {order.id} asks for its outcome"
            ) from None


async def _hand_over(client: "Client", order: Order) -> m.CommandReply:
    """Nobody waits to be told that another agent should be asked: that is found out first."""
    elsewhere = _receiver(await client.snapshot(0), order)
    if elsewhere is None:
        return await client.send(order.verb, dict(order.args), wait="none", **order.options)
    async with type(client)(elsewhere, by=client.by, timeout_seconds=client.timeout_seconds, keys=client.keys) as other:
        return await other.send(order.verb, dict(order.args), wait="none", **order.options)


def _receiver(seen: m.Snapshot, order: Order) -> str | None:
    """The address of the agent that takes an order, if that isn't the one that was asked."""
    if order.verb == "promote":
        return next((peer.address for peer in seen.peers if peer.node == order.node), None)
    return _told_lead(seen)


def exit_code(reply: m.CommandReply) -> int:
    """What a script is told of a command's end: 0, 3 or 4."""
    if reply.state in ("applied", "accepted"):
        return 0
    return ExpiredError.exit_code if reply.state == "expired" else RefusedError.exit_code


def _checked_id(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise InvalidInputError("--id", f"{text!r} is not a UUID") from None
