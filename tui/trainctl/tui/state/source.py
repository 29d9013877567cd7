"""The source of the screens: every agent of a cluster, with requests and commands to the one that conducts.

The screens see it as a `Source`, so that a recorded one can stand in for the network.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, Self

import msgspec

from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Client
from trainctl.protocol.client.cluster import Item, all_runs, attach_cluster
from trainctl.protocol.errors import RefusedError, TrainctlError, UnreachableError
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    Alerts,
    Asker,
    Calibrations,
    CalibrationsRequest,
    CommandReply,
    LogPart,
    LogRequest,
    NodeView,
    Runs,
    RunsRequest,
    RunSummary,
    Snapshot,
    SnapshotRequest,
)
from trainctl.protocol.messages.verbs import VERBS, Acknowledge, Mute, args_type


class Source(Protocol):
    """The agents that the screens follow; `lead` is the one that conducts."""

    by: str  # name that the person at the screens goes by

    @property
    def lead(self) -> Asker: ...

    def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]: ...

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[CommandReply]: ...

    async def follow_run(self, run: str) -> bool:
        """Follow the lead of another active run from here on; False, and nothing has changed, if none leads it."""

    async def runs(self) -> Runs: ...

    async def calibrations(self, node: str) -> Calibrations: ...

    async def log(self, node: str, run: str, rank: int, offset_bytes: int, limit_bytes: int) -> LogPart: ...


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Source]]
LOG_SECONDS = 3.0
"""Seconds that a node's agent may take to give a part of a log."""
UNREACHED_SECONDS = 60.0
"""Seconds after an agent didn't answer for which the one that conducts is asked for what it has."""


class ClusterSource:
    """The agents of a cluster, found from the address of any of them. As a context it can be entered again, and then
    follows what it followed last."""

    def __init__(self, address: str, *, by: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """Take any agent's address; `timeout_seconds`: how long an agent may take to answer."""
        self.address, self.by, self._timeout_seconds = address, by, timeout_seconds
        self._clients = contextlib.AsyncExitStack()
        self.lead = self._client_of(address)  # of the agent that conducts
        self._addresses: dict[str, str] = {}  # of the other nodes' agents
        self._main = ""  # the node whose agent is asked
        self._others: dict[str, Client] = {}  # by address, for their logs
        self._raised: dict[str, frozenset[str]] = {}  # by node, the open alerts of its agent
        self._unreached: dict[str, float] = {}  # address -> when, by the monotonic clock, it didn't answer

    async def __aenter__(self) -> Self:
        self._first = self.lead = await self._clients.enter_async_context(self._client_of(self.address))
        self._others = {}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.aclose()

    def _client_of(self, address: str) -> Client:
        return Client(address, by=self.by, timeout_seconds=self._timeout_seconds)

    async def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]:
        """Yield node and message as `attach_cluster` gives them; requests go to the agent whose snapshot came last."""
        while True:
            async with contextlib.aclosing(self._follow_from(self.address, columns)) as items:
                async for node, item in items:
                    yield node, item

    async def _follow_from(self, address: str, columns: int) -> AsyncGenerator[tuple[str, Item], None]:
        """Yield the messages until another address is to be followed."""
        async with contextlib.aclosing(attach_cluster(address, columns, by=self.by)) as items:
            async for node, item in items:
                if self.address != address:
                    return
                if isinstance(item, Snapshot):
                    self._addresses |= {peer.node: peer.address for peer in item.peers}
                    self._main = item.node.node
                    await self._turn_to(item.node)
                told = item.alerts if isinstance(item, Snapshot) else item
                if isinstance(told, Alerts):
                    self._raised[told.node] = frozenset(alert.id for alert in told.alerts)
                yield node, item

    async def _turn_to(self, node: NodeView) -> None:
        """Ask the agent of `node` from here on: over the line there is where that leads to it (through a tunnel its
        own address may not), else at its own address."""
        if node.address == self.lead.address:
            return
        with contextlib.suppress(TrainctlError):
            if (await self._first.ask(SnapshotRequest, 0)).node.boot == node.boot:
                self.lead = self._first
                return
        self.lead = await self._clients.enter_async_context(self._client_of(node.address))

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[CommandReply]:
        """Send a command to the agent that conducts, with two exceptions.

        What the agent of a node carries out (`promote`) goes to that agent. A command about an alert goes to the agent
        that raised it: a follower raises alerts about its lead, and an agent without a run about its machine.
        """
        to_node = verb in VERBS and VERBS[verb].to_node
        node = options.get("node") or "" if to_node else self._raiser(verb, args, options.get("node"))
        address = self._addresses.get(node) if node else None
        if address is None or address == self.lead.address:
            return self.lead.command(verb, args, **options)
        return self._elsewhere(address, verb, args, **options)

    def _raiser(self, verb: str, args: dict[str, Any], node: str | None) -> str:
        """Return the node whose agent raised the alert that a command is about; empty for the conducting agent's or
        none."""
        kind = args_type(verb)
        about = args.get("id") if kind is Acknowledge else f"{args.get('kind')}:{node}" if kind is Mute else None
        raisers = [at for at, ids in self._raised.items() if about in ids]
        return "" if self._main in raisers else next(iter(raisers), "")

    async def _elsewhere(
        self, address: str, verb: str, args: dict[str, Any], **options: Any
    ) -> AsyncIterator[CommandReply]:
        async with self._client_of(address) as client:
            async for reply in client.command(verb, args, **options):
                yield reply

    async def follow_run(self, run: str) -> bool:
        row = next((row for row in (await self.runs()).runs if row.run == run), None)
        if row is None or row.kind != "hosted" or row.state not in ACTIVE_RUN_STATES or row.lead == self._main:
            return False
        self.address = self._addresses.get(row.lead, self.address)
        return row.lead in self._addresses

    async def runs(self) -> Runs:
        """Return the runs of all agents, each as its lead has it; those of an agent that doesn't answer are left
        out."""
        own = await self.lead.ask(RunsRequest)
        others = [address for node, address in self._addresses.items() if node != self._main]
        if not others:
            return own
        elsewhere: tuple[RunSummary, ...] = ()
        with contextlib.suppress(TrainctlError):
            elsewhere = await all_runs(others)
        rows = {row.run: row for row in own.runs}
        rows |= {row.run: row for row in elsewhere if row.run not in rows or rows[row.run].lead != self._main}
        newest_first = sorted(rows.values(), key=lambda row: row.started_at, reverse=True)
        return msgspec.structs.replace(own, runs=tuple(newest_first))

    async def calibrations(self, node: str) -> Calibrations:
        """Return the profiles of a node, from its own agent."""
        address = self._addresses.get(node, self.lead.address)
        if node == self._main or address == self.lead.address:
            return await self.lead.ask(CalibrationsRequest)
        async with self._client_of(address) as client:
            return await client.ask(CalibrationsRequest)

    async def log(self, node: str, run: str, rank: int, offset_bytes: int, limit_bytes: int) -> LogPart:
        """Return a part of a log from the node's own agent; where that can't be reached from here, through the one that
        conducts."""
        address = self._addresses.get(node)
        late = time.monotonic() - self._unreached.get(address or "", -UNREACHED_SECONDS) < UNREACHED_SECONDS
        if address is not None and node != self._main and not late:
            try:
                return await (await self._other(address)).ask(LogRequest, run, rank, offset_bytes, limit_bytes)
            except UnreachableError:
                self._unreached[address] = time.monotonic()
            except RefusedError:
                pass  # it has no such run, or not this rank's log: the one that conducts knows whom to ask
        return await self.lead.ask(LogRequest, run, rank, offset_bytes, limit_bytes)

    async def _other(self, address: str) -> Client:
        if address not in self._others:
            made = Client(address, by=self.by, timeout_seconds=LOG_SECONDS)
            self._others[address] = made
            await self._clients.enter_async_context(made)
        return self._others[address]
