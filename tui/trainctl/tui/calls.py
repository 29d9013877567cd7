"""One call to an agent from a command: the connection around it, and a command followed to its end."""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from trainctl.protocol import messages as m
from trainctl.protocol import verbs
from trainctl.protocol.errors import ExpiredError, InvalidInputError, RefusedError

if TYPE_CHECKING:
    from trainctl.protocol.client import Client

DEFAULT_ADDRESS = "tcp://127.0.0.1:7474"
"""Where an agent listens by default: `sockets.DEFAULT_PORT`, without loading ZeroMQ to say so."""
ANSWER_SECONDS = 5.0
"""How long the first answer to anything may take."""
Wait = Literal["applied", "accepted", "none"]
T = TypeVar("T")


def call(address: str, work: "Callable[[Client], Awaitable[T]]", *, answer_seconds: float | None = None) -> T:
    """`work` with a connected client, to its end. Raises as the client does."""
    from trainctl.protocol.client import Client  # ZeroMQ: not for `--help`

    async def connected() -> T:
        async with Client(address, timeout_seconds=answer_seconds or ANSWER_SECONDS) as client:
            return await work(client)

    return asyncio.run(connected())


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
        return await client.send(verb, args, wait="none", **order.options)
    replies = client.command(verb, args, **order.options)
    first = await anext(replies)
    if wait == "accepted" or first.state in m.FINAL_COMMAND_STATES:
        return first
    try:
        async with asyncio.timeout(timeout_seconds):
            return await anext(replies)
    except TimeoutError:
        raise ExpiredError(
            f"{verb}: accepted, not applied within {timeout_seconds:g} s; "
            f"the same call with --id {order.id} asks for its outcome"
        ) from None


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
