"""A command as it goes to an agent: checked, sent, and awaited as far as its sender wants."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainctl.protocol.errors import ExpiredError, InvalidInputError, RefusedError, TrainctlError
from trainctl.protocol.messages import FINAL_COMMAND_STATES, CommandReply, Snapshot, SnapshotRequest, verbs

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

Wait = Literal["applied", "accepted", "none"]
LONG_SECONDS = 5.0
"""Seconds after which the sender of an accepted command is told which step it waits for."""


class Commanded(Protocol):
    """A receiver of commands: an agent's client, or what the full screen follows."""

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[CommandReply]: ...


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
    undoes: str | None = None  # a command's id, or an event's number

    @property
    def options(self) -> dict[str, Any]:
        """Return all but the verb and its arguments, as the client takes them."""
        names = ("node", "run", "if_plan", "id", "ttl_seconds", "undoes")
        return {name: getattr(self, name) for name in names}


def make_order(verb: str, args: dict[str, Any], *, id: str | None = None, **options: Any) -> Order:
    """Return an order with an id of its own unless one is given. Raises InvalidInputError naming what is wrong."""
    verbs.check(verb, args, options.get("node"))
    if (options.get("if_plan") or 0) >= 2**63:
        raise InvalidInputError("--if-plan", "is larger than any plan version: see trainctl status for the current one")
    return Order(verb, args, id=_checked_id(id) if id is not None else str(uuid.uuid4()), **options)


def replies(client: Commanded, order: Order) -> Any:
    """Send an order and yield its replies. Raises what the client raises."""
    return client.command(order.verb, dict(order.args), **order.options)


async def send(
    client: "Client", order: Order, wait: Wait, timeout_seconds: float, tell: Callable[[str], None] = lambda _: None
) -> CommandReply:
    """Return the last reply that `wait` asks for. `tell` is given a line if that takes long: which step it waits for.

    Raises ExpiredError when an accepted command hasn't ended within the timeout, UnreachableError when nothing answers.
    """
    if wait == "none":
        return await _hand_over(client, order)
    async with contextlib.aclosing(replies(client, order)) as outcomes:
        first: CommandReply = await anext(outcomes)
        if wait == "accepted" or first.state in FINAL_COMMAND_STATES:
            return first
        telling = asyncio.create_task(_tell_wait(client, order, tell))
        try:
            async with asyncio.timeout(timeout_seconds):
                last: CommandReply = await anext(outcomes)
                return last
        except TimeoutError:
            raise ExpiredError(
                f"{order.verb}: accepted, but not applied within {timeout_seconds:g} s; repeat the call with --id "
                f"{order.id} to get its outcome"
            ) from None
        finally:
            telling.cancel()


async def _tell_wait(client: "Client", order: Order, tell: Callable[[str], None]) -> None:
    await asyncio.sleep(LONG_SECONDS)
    with contextlib.suppress(TrainctlError):
        if words := step_under_way(await client.ask(SnapshotRequest, 0, order.run)):
            tell(f"{order.verb}: accepted; {words}")


def step_under_way(seen: Snapshot) -> str:
    """Return which step a command of a running run waits for, and for how long that has been under way; empty where
    none is known to be."""
    if seen.run is None or seen.run.state != "running" or seen.last_step is None:
        return ""
    since = max(0.0, seen.at - seen.last_step.committed_at)
    return f"it waits for step {seen.last_step.step + 1:,}, which has been under way for {since:.0f} s"


async def _hand_over(client: "Client", order: Order) -> CommandReply:
    """Send a command that nobody waits for. That another agent should be asked, or that the run takes no such command,
    is found out first. Raises RefusedError for the latter."""
    seen = await client.ask(SnapshotRequest, 0)
    is_meant = seen.run is not None and order.run in (None, seen.run.run)
    if seen.run is not None and is_meant and (why := seen.run.why_not(order.verb)):
        raise RefusedError(f"{order.verb} rejected: {why}")
    to_node = verbs.VERBS[order.verb].to_node and order.node is not None
    peer = next((peer for peer in seen.peers if to_node and peer.node == order.node), None)
    async with client.at_lead() if not to_node else client.at(peer.address if peer else client.address) as receiver:
        return await receiver.send(order.verb, dict(order.args), wait="none", **order.options)


def exit_code(reply: CommandReply) -> int:
    """Return the exit code that tells a script how a command ended: 0, 3 or 4."""
    if reply.state in ("applied", "accepted"):
        return 0
    return ExpiredError.exit_code if reply.state == "expired" else RefusedError.exit_code


def _checked_id(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise InvalidInputError("--id", f"{text!r} is not a UUID: give the id of an earlier command") from None
