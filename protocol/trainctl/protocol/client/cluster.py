"""Clients of a whole cluster: the lead is found, and all that it publishes is followed beside the other machines'
state.

async for node, message in attach_cluster("tcp://127.0.0.1:7474"):
    print(node, type(message).__name__)
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Mapping, Sequence

import msgspec
import zmq.asyncio

from trainctl.protocol.client.client import DEFAULT_TIMEOUT_SECONDS, Client, Connection, lead_address
from trainctl.protocol.errors import START_ONE, InvalidInputError, NotConnectedError, TrainctlError, UnreachableError
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    Alerts,
    Event,
    Heartbeat,
    HostReading,
    Live,
    NodeView,
    RankStep,
    RunsRequest,
    RunSummary,
    RunView,
    Sample,
    Snapshot,
    SnapshotRequest,
    StepCommitted,
)
from trainctl.protocol.security.keyring import Keyring, current
from trainctl.protocol.wire.sockets import end_tasks

Item = Snapshot | NodeView | Live | Heartbeat | Connection
RETRY_SECONDS = 1.0
WAITING_BATCHES = 256


async def attach_cluster(
    address: str,
    columns: int = 120,
    *,
    by: str | None = None,
    timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
    keys: Keyring | None = None,
) -> AsyncGenerator[tuple[str, Item], None]:
    """Yield pairs of a node and a message: all that `Client.attach` gives of the agent that leads the active run; of
    every other agent its NodeView, readings of its machine, heartbeats, alerts, and the state of the line to it.

    `address` is that of any agent of the cluster. Where no run is active, its agent counts as the leading one; when
    another one begins to lead, that one's snapshot follows. The node is empty until the agent has sent its name.
    Raises what `Client.attach` raises for the leading agent.
    """
    cluster = _Cluster(address, columns, by, timeout_seconds, keys or current())
    try:
        cluster.watch(address)
        while True:
            watch, items = await cluster.queue.get()
            for item in items:
                if cluster.watches.get(watch.address) is watch:
                    for piece in cluster.take(watch, item):
                        yield cluster.names.get(watch.address, ""), piece
    finally:
        await cluster.close()


async def conducting(client: Client) -> AsyncGenerator[Item, None]:
    """Yield what `Client.attach` gives, of the agent that `client` is connected to until another one conducts, then of
    that one, which a Snapshot begins. "connecting" is left out: it tells nothing new."""
    conducts = ""
    items = attach_cluster(client.address, 0, by=client.by, timeout_seconds=client.timeout_seconds, keys=client.keys)
    async with contextlib.aclosing(items):
        async for node, item in items:
            if isinstance(item, Snapshot) and node != conducts:
                conducts = node
                yield Connection("connected", time.monotonic())
            of_another = node not in ("", conducts) or isinstance(item, NodeView)  # just conducted: it is one of them
            if not of_another and getattr(item, "state", "") != "connecting":
                yield item


class _Watch:
    """One agent's attachment, run by a task of its own."""

    def __init__(self, address: str, task: "asyncio.Task[None] | None" = None) -> None:
        self.address, self.task = address, task


class _Cluster:
    def __init__(self, address: str, columns: int, by: str | None, timeout_seconds: float, keys: Keyring) -> None:
        self.queue: asyncio.Queue[tuple[_Watch, Sequence[Item | TrainctlError]]] = asyncio.Queue(WAITING_BATCHES)
        self.watches: dict[str, _Watch] = {}  # by the agent's address
        self.names: dict[str, str] = {}  # address -> node
        self._main, self._columns, self._by, self._timeout_seconds = address, columns, by, timeout_seconds
        self._keys = keys
        self._context = zmq.asyncio.Context()
        self._is_active = False
        self._run, self._term = "", 0  # that was last seen to be led
        self._old: list[asyncio.Task[None]] = []

    def watch(self, address: str) -> None:
        """Attach to an agent, again if it was attached to already."""
        before = self.watches.get(address)
        if before is not None and before.task is not None:
            before.task.cancel()
            self._old.append(before.task)
        watch = self.watches[address] = _Watch(address)
        watch.task = asyncio.create_task(self._attach(watch), name=f"trainctl-cluster-{address}")

    async def _attach(self, watch: _Watch) -> None:
        columns = self._columns if watch.address == self._main else 0
        while True:
            try:
                async with (
                    self._client(watch.address) as client,
                    contextlib.aclosing(client.attach_at_once(columns)) as batches,
                ):
                    async for batch in batches:
                        await self.queue.put((watch, batch))
            except TrainctlError as error:
                await self.queue.put((watch, [error]))
            await asyncio.sleep(RETRY_SECONDS)

    def _client(self, address: str) -> Client:
        return Client(
            address, by=self._by, timeout_seconds=self._timeout_seconds, keys=self._keys, context=self._context
        )

    def take(self, watch: _Watch, item: Item | TrainctlError) -> list[Item]:
        """Return the part of an item that is to be passed on. Raises the error that the leading agent's attachment
        ended with."""
        is_main = watch.address == self._main
        if isinstance(item, TrainctlError):
            if is_main:
                raise item
            return [Connection("silent", time.monotonic(), str(item))]
        if isinstance(item, Snapshot):
            self._meet(watch.address, item)
        view = item.run if isinstance(item, Snapshot) else item if isinstance(item, RunView) else None
        view = view if view is not None and view.kind == "hosted" else None  # a guest says nothing of who leads
        if self._has_moved(watch.address, view):
            return []
        if is_main:
            self._is_active = self._is_active if view is None else view.state in ACTIVE_RUN_STATES
            if view is not None:
                self._run, self._term = view.run, view.generation.term
            return [item]
        match item:
            case Snapshot():
                alerts = item.alerts or Alerts(node=item.node.node)
                return [item.node, alerts, *([item.node.host] if item.node.host is not None else [])]
            case HostReading() | Heartbeat() | Alerts() | NodeView() | Connection():
                return [item]
            case RunView() | StepCommitted() | RankStep() | Event() | Sample():
                return []  # the lead's to tell

    def _meet(self, address: str, snapshot: Snapshot) -> None:
        """Learn the names, and attach to agents that are new."""
        self.names[address] = snapshot.node.node
        for peer in snapshot.peers:
            self.names[peer.address] = peer.node
            if peer.address not in self.watches:
                self.watch(peer.address)

    def _has_moved(self, address: str, view: RunView | None) -> bool:
        """Return whether another agent than was thought leads; then that one is attached to in full."""
        if view is None or view.state not in ACTIVE_RUN_STATES:
            return False
        conducts = view.lead == self.names.get(address)
        if address == self._main:
            found = [at for at, node in self.names.items() if node == view.lead] if not conducts else []
        else:
            newer = view.run == self._run and view.generation.term > self._term  # promoted; the one before may be gone
            found = [address] if conducts and (newer or not self._is_active) else []
        if not found or found[0] == self._main:
            return False
        before, self._main, self._is_active = self._main, found[0], False
        self.watch(before)
        self.watch(self._main)
        return True

    async def close(self) -> None:
        """End all attachments."""
        tasks = [*self._old, *(watch.task for watch in self.watches.values() if watch.task is not None)]
        try:
            await end_tasks(tasks)
        finally:
            self._context.destroy(linger=0)


LOOK_SECONDS = 3.0
"""Seconds the agents of a cluster have to answer whether they lead a run."""
GRACE_SECONDS = 0.5
"""Seconds left for the others once one has answered."""


class SeveralRunsError(InvalidInputError):
    """A run must be named, because several are active."""

    def __init__(self, where: str, problem: str, leads: dict[str, str]) -> None:
        super().__init__(where, problem)
        self.leads = leads  # address of each run's lead, by the run's ID


def conducts(seen: Snapshot) -> bool:
    """Return whether the agent that sent a snapshot leads an active run."""
    run = seen.run
    if run is None or run.kind != "hosted":
        return False
    return run.state in ACTIVE_RUN_STATES and run.lead == seen.node.node


async def look(address: str, refused: list[TrainctlError] | None = None) -> Snapshot | None:
    """An agent's snapshot; None if it doesn't answer. Why, if there is something, is added to `refused`."""
    try:
        async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
            return await client.ask(SnapshotRequest, 0)
    except TrainctlError as error:
        if refused is not None and not isinstance(error, NotConnectedError):
            refused.append(error)
        return None


async def find_agent(addresses: Sequence[str], run: str | None = None, *, leads: bool = True) -> str:
    """Return the address, of several agents', of the one to ask: of a run the node that led it last if it answers, else
    one that knows it. Without a run it is the lead of the active one, else the first that answers; without `leads` the
    first that answers. A single address isn't asked. Raises UnreachableError if none answers, and InvalidInputError if
    several runs are active."""
    if len(addresses) == 1:
        return addresses[0]
    if run is not None:
        knowing = dict(zip(addresses, await asyncio.gather(*(_knows(one, run) for one in addresses)), strict=True))
        best = max(addresses, key=lambda address: knowing[address])
        if knowing[best][0]:
            return best
    found = await _answers(addresses)
    by_run = _leads(found) if leads else {}
    if len(by_run) > 1:
        named = f"several runs are active: {', '.join(sorted(by_run))}; name one of them"
        problem = named if run is None else f"no agent knows {run}; active: {', '.join(by_run)}"
        raise SeveralRunsError("RUN", problem, by_run)
    return next(iter(by_run.values()), None) or next(iter(found))


async def _knows(address: str, run: str) -> tuple[bool, bool]:
    """Return whether the agent knows the run, and has led it."""
    try:
        async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
            known = [row for row in (await client.ask(RunsRequest)).runs if row.run == run]
            led = bool(known) and known[0].lead == (await client.ask(SnapshotRequest, 0)).node.node
            return bool(known), led
    except TrainctlError:
        return False, False


def _leads(found: Mapping[str, Snapshot]) -> dict[str, str]:
    """Return the address of the lead of each active run by the run's ID, also where only a follower has answered; its
    own if it can't reach the lead either."""
    leads: dict[str, str] = {}
    for address, seen in sorted(found.items(), key=lambda item: conducts(item[1])):
        if seen.run is not None and seen.run.kind == "hosted" and seen.run.state in ACTIVE_RUN_STATES:
            leads[seen.run.run] = address if conducts(seen) else lead_address(seen) or address
    return leads


async def _answers(addresses: Sequence[str]) -> dict[str, Snapshot]:
    """Return the snapshots of the agents that answer soon after the first, in the order of their addresses. Raises
    UnreachableError if none does."""
    refused: list[TrainctlError] = []
    looks = {address: asyncio.create_task(look(address, refused)) for address in addresses}
    pending: set[asyncio.Task[Snapshot | None]] = set(looks.values())
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


async def all_runs(addresses: Sequence[str]) -> tuple[RunSummary, ...]:
    """Return the runs that several agents know, newest first, each as its lead has it if that answers, with the space
    that it takes on all of them. Raises UnreachableError if none answers."""
    found: dict[str, RunSummary] = {}
    sizes: dict[str, int] = {}

    async def ask(address: str, node: str) -> None:
        with contextlib.suppress(TrainctlError):
            async with Client(address, timeout_seconds=LOOK_SECONDS) as client:
                for row in (await client.ask(RunsRequest)).runs:
                    sizes[row.run] = sizes.get(row.run, 0) + (row.size_bytes or 0)
                    if row.run not in found or row.lead == node:
                        found[row.run] = row

    answers = await _answers(addresses)
    await asyncio.gather(*(ask(address, seen.node.node) for address, seen in answers.items()))
    rows = (msgspec.structs.replace(row, size_bytes=sizes[row.run]) for row in found.values())
    return tuple(sorted(rows, key=lambda row: row.started_at, reverse=True))


def _nobody(addresses: Sequence[str], refused: list[TrainctlError]) -> TrainctlError:
    """Return why none of several agents has answered: the keys don't fit, or none is there."""
    for error in sorted(refused, key=lambda error: isinstance(error, UnreachableError)):
        return error
    return UnreachableError(f"no agent of the cluster responds: {', '.join(addresses)}; {START_ONE}")
