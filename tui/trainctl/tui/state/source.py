"""What the screens follow: every agent of a cluster, with requests and commands to the one that conducts.

The screens see it as a `Source`, so that a recorded one can stand in for the network.
"""

import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any, Protocol, Self

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Client
from trainctl.protocol.client.cluster import Item, all_runs, attach_cluster
from trainctl.protocol.errors import RefusedError, TrainctlError, UnreachableError
from trainctl.protocol.messages.verbs import VERBS, Acknowledge, Mute, args_type


class Source(Protocol):
    """The part of an agent's client that the full-screen program uses; errors are that client's."""

    def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]: ...

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[m.CommandReply]: ...

    async def snapshot(self, columns: int = 120, run: str | None = None) -> m.Snapshot: ...

    async def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History: ...

    async def follow_run(self, run: str) -> bool:
        """Follow the lead of another active run from here on; False, and nothing has changed, if none leads it."""

    async def runs(self) -> m.Runs: ...

    async def works(self) -> m.Works: ...

    async def events(
        self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False
    ) -> m.Events: ...

    async def samples(
        self, run: str | None = None, after_row: int = 0, limit: int = 100, newest: bool = False
    ) -> m.Samples: ...

    async def pairs(self, run: str | None = None, limit: int = 20) -> m.Pairs: ...

    async def traces(self, run: str | None = None) -> m.Traces: ...

    async def trace_part(self, run: str, node: str, file: str, offset_bytes: int) -> m.TracePart: ...

    async def policies(self, run: str | None = None) -> m.Policies: ...

    async def diagnosis(self, run: str | None = None) -> m.DiagnosisReply: ...

    async def profiles(self, node: str) -> m.Profiles: ...

    async def log(self, node: str, run: str, rank: int, offset_bytes: int, limit_bytes: int) -> m.LogPart: ...

    async def attend(self, viewer: str = "", *, read_only: bool = False, leaving: bool = False) -> m.Viewers: ...


def _begun(row: m.RunSummary) -> float:
    return row.started_at


Connect = Callable[[], contextlib.AbstractAsyncContextManager[Source]]
LOG_SECONDS = 3.0
"""How long a node's agent may take to give a part of a log."""
UNREACHED_SECONDS = 60.0
"""For so long after an agent didn't answer, the one that conducts is asked for what it has."""


class ClusterSource:
    """The agents of a cluster, found from the address of any of them. As a context it can be entered again, and then
    follows what it followed last."""

    def __init__(self, address: str, *, by: str, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        """`timeout_seconds`: how long an agent may take to answer."""
        self.address, self._by, self._timeout_seconds = address, by, timeout_seconds
        self._clients = contextlib.AsyncExitStack()
        self._client = self._client_of(address)
        self._addresses: dict[str, str] = {}  # of the other nodes' agents
        self._main = ""  # the node whose agent is asked
        self._others: dict[str, Client] = {}  # by address, for their logs
        self._raised: dict[str, frozenset[str]] = {}  # by node, the open alerts of its agent
        self._unreached: dict[str, float] = {}  # address -> when, by the monotonic clock, it didn't answer

    async def __aenter__(self) -> Self:
        self._first = self._client = await self._clients.enter_async_context(self._client_of(self.address))
        self._others = {}
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._clients.aclose()

    def _client_of(self, address: str) -> Client:
        return Client(address, by=self._by, timeout_seconds=self._timeout_seconds)

    async def follow(self, columns: int = 120) -> AsyncGenerator[tuple[str, Item], None]:
        """(node, message) as `attach_cluster` gives them; requests go to the agent whose snapshot came last."""
        while True:
            async with contextlib.aclosing(self._follow_from(self.address, columns)) as items:
                async for node, item in items:
                    yield node, item

    async def _follow_from(self, address: str, columns: int) -> AsyncGenerator[tuple[str, Item], None]:
        """Yield the messages until another address is to be followed."""
        async with contextlib.aclosing(attach_cluster(address, columns, by=self._by)) as items:
            async for node, item in items:
                if self.address != address:
                    return
                if isinstance(item, m.Snapshot):
                    self._addresses |= {peer.node: peer.address for peer in item.peers}
                    self._main = item.node.node
                    await self._turn_to(item.node)
                told = item.alerts if isinstance(item, m.Snapshot) else item
                if isinstance(told, m.Alerts):
                    self._raised[told.node] = frozenset(alert.id for alert in told.alerts)
                yield node, item

    async def _turn_to(self, node: m.NodeView) -> None:
        """Ask the agent of `node` from here on: over the line there is where that leads to it (through a tunnel its
        own address may not), else at its own address."""
        if node.address == self._client.address:
            return
        with contextlib.suppress(TrainctlError):
            if (await self._first.snapshot(0)).node.boot == node.boot:
                self._client = self._first
                return
        self._client = await self._clients.enter_async_context(self._client_of(node.address))

    def command(self, verb: str, args: dict[str, Any], **options: Any) -> AsyncIterator[m.CommandReply]:
        """Send a command to the agent that conducts, with two exceptions.

        What the agent of a node carries out (`promote`) goes to that agent. A command about an alert goes to the agent
        that raised it: a follower raises alerts about its lead, and an agent without a run about its machine.
        """
        to_node = verb in VERBS and VERBS[verb].to_node
        node = options.get("node") or "" if to_node else self._raiser(verb, args, options.get("node"))
        address = self._addresses.get(node) if node else None
        if address is None or address == self._client.address:
            return self._client.command(verb, args, **options)
        return self._elsewhere(address, verb, args, **options)

    def _raiser(self, verb: str, args: dict[str, Any], node: str | None) -> str:
        """The node whose agent raised the alert that a command is about; empty for the conducting agent's or none."""
        kind = args_type(verb)
        about = args.get("id") if kind is Acknowledge else f"{args.get('kind')}:{node}" if kind is Mute else None
        raisers = [at for at, ids in self._raised.items() if about in ids]
        return "" if self._main in raisers else next(iter(raisers), "")

    async def _elsewhere(
        self, address: str, verb: str, args: dict[str, Any], **options: Any
    ) -> AsyncIterator[m.CommandReply]:
        async with self._client_of(address) as client:
            async for reply in client.command(verb, args, **options):
                yield reply

    async def snapshot(self, columns: int = 120, run: str | None = None) -> m.Snapshot:
        return await self._client.snapshot(columns, run)

    async def history(
        self, run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History:
        return await self._client.history(run, metrics, first_step, last_step, columns)

    async def follow_run(self, run: str) -> bool:
        row = next((row for row in (await self.runs()).runs if row.run == run), None)
        if row is None or row.kind != "hosted" or row.state not in m.ACTIVE_RUN_STATES or row.lead == self._main:
            return False
        self.address = self._addresses.get(row.lead, self.address)
        return row.lead in self._addresses

    async def runs(self) -> m.Runs:
        """The runs of all agents, each as its lead has it; those of an agent that doesn't answer are left out."""
        own = await self._client.runs()
        others = [address for node, address in self._addresses.items() if node != self._main]
        if not others:
            return own
        elsewhere: tuple[m.RunSummary, ...] = ()
        with contextlib.suppress(TrainctlError):
            elsewhere = await all_runs(others)
        rows = {row.run: row for row in own.runs}
        rows |= {row.run: row for row in elsewhere if row.run not in rows or rows[row.run].lead != self._main}
        return msgspec.structs.replace(own, runs=tuple(sorted(rows.values(), key=_begun, reverse=True)))

    async def works(self) -> m.Works:
        return await self._client.works()

    async def events(
        self, run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False
    ) -> m.Events:
        return await self._client.events(run, after_id, limit, newest)

    async def samples(
        self, run: str | None = None, after_row: int = 0, limit: int = 100, newest: bool = False
    ) -> m.Samples:
        return await self._client.samples(run, after_row, limit, newest)

    async def profiles(self, node: str) -> m.Profiles:
        """Those of a node, from its own agent."""
        address = self._addresses.get(node, self._client.address)
        if node == self._main or address == self._client.address:
            return await self._client.profiles()
        async with self._client_of(address) as client:
            return await client.profiles()

    async def pairs(self, run: str | None = None, limit: int = 20) -> m.Pairs:
        return await self._client.pairs(run, limit)

    async def traces(self, run: str | None = None) -> m.Traces:
        return await self._client.traces(run)

    async def trace_part(self, run: str, node: str, file: str, offset_bytes: int) -> m.TracePart:
        return await self._client.trace_part(run, node, file, offset_bytes)

    async def policies(self, run: str | None = None) -> m.Policies:
        return await self._client.policies(run)

    async def diagnosis(self, run: str | None = None) -> m.DiagnosisReply:
        return await self._client.diagnosis(run)

    async def log(self, node: str, run: str, rank: int, offset_bytes: int, limit_bytes: int) -> m.LogPart:
        """From the node's own agent; where that can't be reached from here, through the one that conducts."""
        address = self._addresses.get(node)
        late = time.monotonic() - self._unreached.get(address or "", -UNREACHED_SECONDS) < UNREACHED_SECONDS
        if address is not None and node != self._main and not late:
            try:
                return await (await self._other(address)).log(run, rank, offset_bytes, limit_bytes)
            except UnreachableError:
                self._unreached[address] = time.monotonic()
            except RefusedError:
                pass  # it has no such run, or not this rank's log: the one that conducts knows whom to ask
        return await self._client.log(run, rank, offset_bytes, limit_bytes)

    async def _other(self, address: str) -> Client:
        if address not in self._others:
            made = Client(address, by=self._by, timeout_seconds=LOG_SECONDS)
            self._others[address] = made
            await self._clients.enter_async_context(made)
        return self._others[address]

    async def attend(self, viewer: str = "", *, read_only: bool = False, leaving: bool = False) -> m.Viewers:
        return await self._client.attend(viewer, read_only=read_only, leaving=leaving)
