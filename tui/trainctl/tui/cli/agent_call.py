"""One call to an agent from a subcommand, and how a command that was sent ended. ZeroMQ loads with the first call, not
for `--help`.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import typer

from trainctl.protocol.errors import ExpiredError, InvalidInputError, TrainctlError
from trainctl.protocol.messages import (
    CommandReply,
    HostReading,
    PeerView,
    RunsRequest,
    RunSummary,
    Snapshot,
    SnapshotRequest,
)
from trainctl.tui.cli import output
from trainctl.tui.commands import command

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

LOOKS, AGAIN_SECONDS = 5, 0.05
"""Looks for a step that all ranks have reported, and seconds between them."""
ANSWER_SECONDS = 5.0
"""Seconds that the first answer to anything may take."""
T = TypeVar("T")


def call(
    address: str, work: "Callable[[Client], Awaitable[T]]", *, answer_seconds: float | None = None, lead: bool = False
) -> T:
    """Run `work` with a client connected to `address`. With `lead`, an agent that only hosts a rank is replaced by the
    active run's lead. The client's exceptions are passed on."""
    from trainctl.protocol.client.client import Client

    async def connected() -> T:
        async with Client(address, timeout_seconds=answer_seconds or ANSWER_SECONDS) as client:
            if not lead:
                return await work(client)
            async with client.at_lead() as leading:
                return await work(leading)

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


def find_agent(addresses: Sequence[str], run: str | None = None, *, leads: bool = True) -> str:
    """Return the address of the agent to ask, as `cluster.find_agent` does."""
    from trainctl.protocol.client import cluster

    return asyncio.run(cluster.find_agent(addresses, run, leads=leads))


def all_runs(addresses: Sequence[str], seconds: float = ANSWER_SECONDS) -> tuple[RunSummary, ...]:
    """Return the runs that several agents know, newest first. A single agent has so many seconds to answer; one that
    only hosts a rank is replaced by the active run's lead."""
    if len(addresses) == 1:
        return call(addresses[0], lambda client: client.ask(RunsRequest), answer_seconds=seconds, lead=True).runs
    from trainctl.protocol.client import cluster

    return asyncio.run(cluster.all_runs(addresses))


async def settled_snapshot(client: "Client", run: str | None) -> Snapshot:
    """Return a snapshot in which all ranks that report have reported one step, if one comes within a few looks."""
    from trainctl.protocol.analysis.straggler import same_step

    for _ in range(LOOKS):
        snapshot = await client.ask(SnapshotRequest, 0, run)
        view = snapshot.run
        if view is None or view.state != "running" or same_step(view.ranks, snapshot.rank_steps):
            break
        await asyncio.sleep(AGAIN_SECONDS)
    return snapshot


async def hosts_of(peers: Sequence[PeerView]) -> dict[str, HostReading]:
    """Return what the other nodes' agents read of their machines now; those that don't answer are left out."""
    from trainctl.protocol.client.cluster import look

    reached = [peer for peer in peers if peer.state != "unknown"]
    seen = await asyncio.gather(*(look(peer.address) for peer in reached))
    return {
        peer.node: snapshot.node.host
        for peer, snapshot in zip(reached, seen, strict=True)
        if snapshot is not None and snapshot.node.host is not None
    }


FIELDS = ("id", "state", "step", "reason", "field", "before", "after", "plan_version", "run")
"""The fields of a command's reply that `--json` prints, beside its verb and its node, whatever its state."""


@contextlib.contextmanager
def told(order: command.Order, *, json: bool) -> Iterator[None]:
    """With `json`, print an error that ends a command as one object and exit with the error's code. The object has the
    id for repeating the command. Without `json`, and for invalid arguments, the exception is passed on.
    """
    try:
        yield
    except InvalidInputError:
        raise
    except TrainctlError as error:
        if not json:
            raise
        state = "accepted" if isinstance(error, ExpiredError) else None
        output.emit_error(output.error_code(error), str(error), **_unsettled(order, state))
        raise typer.Exit(error.exit_code) from None
    except KeyboardInterrupt:
        if not json:
            raise
        output.emit_error("interrupted", "interrupted", **_unsettled(order, None))
        raise typer.Exit(output.INTERRUPTED) from None


def _unsettled(order: command.Order, state: str | None) -> dict[str, Any]:
    settled = {"id": order.id, "state": state, "reason": "", "run": order.run}
    return {"verb": order.verb, "node": order.node, **dict.fromkeys(FIELDS), **settled}


def send(address: str, order: command.Order, wait: command.Wait, timeout: float) -> CommandReply:
    """Send a command and return the last reply that `wait` asks for. Raises what `command.send` raises."""
    answer_seconds = min(ANSWER_SECONDS, timeout)
    return call(
        address, lambda client: command.send(client, order, wait, timeout, output.tell), answer_seconds=answer_seconds
    )


def finish(order: command.Order, reply: CommandReply, *, json: bool, code: int, more: str = "") -> int:
    """Print how a command ended, with `more` to say about it, and return the exit code."""
    from trainctl.tui.cli import tables

    line = tables.reply_line(order.verb, reply, order.node) + more
    if json and code:
        output.emit_error(reply.state, line, **fields(order, reply))
    elif json:
        output.emit_ok(**fields(order, reply))
    elif code:
        output.complain(line)
    else:
        output.say(line)
        if order.verb == "sample" and reply.state == "applied":
            output.say(output.log_text(reply.after or "", raw=False).strip() or "(the answer is empty)")
    return code


def fields(order: command.Order, reply: CommandReply) -> dict[str, Any]:
    """Return the `--json` fields for a command and its reply."""
    return {"verb": order.verb, "node": order.node, **{name: getattr(reply, name) for name in FIELDS}}
