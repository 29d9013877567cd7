"""Replication of the lead's record to every node of a run, in order, so that each could lead it.

A node that missed something reports where its record ends when it connects again, and gets the rest from the lead.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Self

from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.records.keys import DURABLE_KEY, OWN_KEYS
from trainctl.node_agent.records.run_db import RECENT_PLANS, RunDb
from trainctl.node_agent.transport.peer_link import PeerLink
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import (
    MAX_COUNT,
    HostedRank,
    Kept,
    KeptCommand,
    KeptDrifts,
    KeptEvaluation,
    KeptEvent,
    KeptPairs,
    KeptPart,
    KeptPlan,
    KeptRetraction,
    KeptSample,
    KeptStep,
    KeptValue,
    PeerKeep,
)
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.wire import codec

PAGE_STEPS, PAGE_EVENTS, HANDED_PLANS = 100, 100, 8
HANDED_BYTES = codec.FRAME_BYTES // 2
"""Most bytes beyond its own record that a claimant gets in the one message that consents."""
PAUSE_SECONDS = 0.05
"""Seconds between two pages for a node that is behind, which leaves both time for other work."""
FRAME_BYTES = codec.CONTROL_FRAME_BYTES - 4096
"""Most bytes of items in one message; the rest of the message fits in what is left."""

Node = str
OpenCommands = Callable[[], Iterable[KeptCommand]]


class Copies:
    """The copies of one run's record on the other nodes that `links` lead to."""

    def __init__(self, recorder: RunDb, links: Mapping[Node, PeerLink], commands: OpenCommands) -> None:
        """`commands`: those of the run that a successor may be asked about."""
        self._recorder, self._links, self._commands = recorder, links, commands
        self._paths = RunPaths(recorder.path.parent)
        self._run = self._paths.directory.name
        self._waiting: dict[Node, list[Kept]] = {}  # of the nodes that have all that was kept before it
        self._ranks: dict[Node, int] = {}
        self._behind: dict[Node, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()  # what was kept first is sent first

    def add(self, item: Kept) -> None:
        """To be sent with the next `flush`. A plan is passed on to the ranks that are in it anyway."""
        planned = {work.rank for work in item.plan.work} if isinstance(item, KeptPlan) else ()
        for node, waiting in self._waiting.items():
            if self._ranks[node] not in planned:
                waiting.append(item)

    async def flush(self) -> None:
        """Send what has been added; a node that can't be reached gets it when it can be."""
        if not any(self._waiting.values()):
            return
        async with self._turn:
            for node in [node for node, waiting in self._waiting.items() if waiting]:
                items, self._waiting[node] = self._waiting[node], []
                if not await self._send(node, items):
                    self._waiting.pop(node, None)

    def begin(self, node: Node, hosted: HostedRank) -> None:
        """A node is connected: give it what it lacks, by what it reports of its record."""
        self._waiting.pop(node, None)
        before = self._behind.pop(node, None)
        if before is not None:
            before.cancel()
        if node in self._links:
            self._ranks[node] = hosted.rank
            self._behind[node] = asyncio.create_task(self._catch_up(node, hosted), name=f"copies-{node}")

    async def close(self, finish_seconds: float = 0.0) -> None:
        """Send nothing any more; nodes that are still behind are given so long to get the rest."""
        tasks = [task for task in self._behind.values() if not task.done()]
        if tasks and finish_seconds:
            await asyncio.wait(tasks, timeout=finish_seconds)
        self._behind.clear()
        self._waiting.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _catch_up(self, node: Node, hosted: HostedRank) -> None:
        """Page after page. Whatever is kept from the last one's reading on waits behind it.

        The steps of the newest plans are sent even if the node has them: a lead that takes over commits those that its
        predecessor may have committed already, and then the node may have the predecessor's rows.
        """
        with contextlib.suppress(InvalidInputError), RecordReader(self._paths) as reader:
            step, last_event = agreed(reader, hosted)
            first = step
            if step < hosted.step or last_event < hosted.event:
                await self._send(node, [KeptRetraction(after_step=step, after_event=last_event)])
            step = max(0, step - RECENT_PLANS)
            while True:
                await self._recorded()
                steps, more_steps = reader.steps(step, PAGE_STEPS)
                events, more_events = reader.events(last_event, PAGE_EVENTS)
                step, last_event = (steps[-1].step if steps else step), (events[-1].id if events else last_event)
                page: list[Kept] = []
                for row in steps:
                    page += [KeptStep(step=row), *(KeptPart(part=part) for part in reader.rank_steps(row.step))]
                page += [KeptEvent(event=event) for event in events]
                if not (more_steps or more_events):
                    break
                if not await self._send(node, page):
                    return
                await asyncio.sleep(PAUSE_SECONDS)
            self._waiting[node] = [*page, *state(reader, first), *self._commands()]
        await self.flush()

    async def _recorded(self) -> None:
        """Wait until all that was kept so far can be read in the record."""
        await self._recorder.settled()
        while self._recorder.is_refused:
            await asyncio.sleep(PAUSE_SECONDS)
            await self._recorder.settled()

    async def _send(self, node: Node, items: Sequence[Kept]) -> bool:
        for part in packed(items):
            if not await self._links[node].send(PeerKeep(link="", seq=0, run=self._run, items=part)):
                return False
        return True


def agreed(reader: RecordReader, hosted: HostedRank) -> tuple[int, int]:
    """The newest step and event of another node's record that are in this one too: what it has beyond them is of a
    lead that has been replaced, or was retracted meanwhile.

    In this record generations grow with the steps, and what it has of the other's last generation or an older one the
    other has as well.
    """
    if hosted.generation is None:
        return 0, reader.event_by(hosted.event, MAX_COUNT)
    return reader.step_by(hosted.step, hosted.generation), reader.event_by(hosted.event, hosted.generation.term)


def state(reader: RecordReader, after_step: int) -> Iterator[Kept]:
    """Return what of a record isn't in its steps and events; of evaluations and samples those from a step on."""
    for key, value in reader.metas().items():
        if key not in OWN_KEYS:
            yield KeptValue(key=key, value=value)
    for made in reader.evaluations(undone=True):
        if made.step >= after_step:
            yield KeptEvaluation(
                step=made.step,
                at=made.at,
                loss=made.loss,
                weight=made.weight,
                seconds=made.seconds,
                values=dict(made.values),
            )
    for pairs in reader.held_out_pairs(MAX_COUNT, after_step):
        yield KeptPairs(pairs=pairs)
    yield from _samples(reader, after_step)


def _samples(reader: RecordReader, after_step: int) -> Iterator[Kept]:
    after, more = 0, True
    while more:
        page, after, more = reader.samples(after)
        yield from (KeptSample(sample=one) for one in page if one.step >= after_step)


def beyond(recorder: RunDb, paths: RunPaths, own: HostedRank, other: HostedRank) -> list[Kept]:
    """Return what a node's record has and another one's, which is about to lead the run, has not: its lead was gone
    before it had sent both the same. Raises RefusedError if that is much, for then this node is the one to lead."""
    if not is_beyond(own, other):
        return []
    items: list[Kept] = [KeptPlan(plan=plan) for plan in recorder.last_state().plans[-HANDED_PLANS:]]
    with RecordReader(paths) as reader:
        step, last_event = agreed(reader, other)
        steps, more = reader.steps(step, PAGE_STEPS)
        if more:
            text = f"rank {other.rank}'s node has the record up to step {other.step:,}, rank {own.rank}'s node up to"
            raise RefusedError(f"{text} step {own.step:,}: promote rank {own.rank}'s node")
        events, _ = reader.events(last_event, PAGE_EVENTS)
        for row in steps:
            items += [KeptStep(step=row), *(KeptPart(part=part) for part in reader.rank_steps(row.step))]
        items += [*(KeptEvent(event=event) for event in events), *state(reader, step)]
    if sum(len(codec.encode(item)) for item in items) > HANDED_BYTES:
        raise RefusedError("its record is too far ahead of the claimant's for one message; try again in a moment")
    return items


def far(hosted: HostedRank) -> tuple[int, int, int, int]:
    """Return how far a record goes, to be compared with another one's of the same run."""
    return hosted.generation.term if hosted.generation else 0, hosted.step, hosted.seq, hosted.event


def is_beyond(own: HostedRank, other: HostedRank) -> bool:
    """Return whether a record has anything that another one of the same run hasn't; not what an older lead kept
    alone."""
    (term, *has), (other_term, *other_has) = far(own), far(other)
    return term > other_term or (term == other_term and any(a > b for a, b in zip(has, other_has, strict=True)))


def packed(items: Iterable[Kept]) -> Iterator[tuple[bytes, ...]]:
    """Items in msgpack, as many at a time as one message holds; one that is too large for any is left out."""
    part: list[bytes] = []
    size = 0
    for frame in map(codec.encode, items):
        if part and size + len(frame) + 8 > FRAME_BYTES:
            yield tuple(part)
            part, size = [], 0
        if len(frame) + 8 <= FRAME_BYTES:
            part.append(frame)
            size += len(frame) + 8
    if part:
        yield tuple(part)


def keep_all(recorder: RunDb, items: Sequence[bytes]) -> list[KeptCommand]:
    """Keep messages of `Kept` in msgpack; the commands among them, which are the agent's to keep. Raises
    ProtocolError, and keeps none then."""
    kept = [codec.decode_kept(item) for item in items]
    for item in kept:
        keep(recorder, item)
    return [item for item in kept if isinstance(item, KeptCommand)]


def keep(recorder: RunDb, item: Kept) -> None:
    """Keep in this node's record what the lead has kept in its own."""
    match item:
        case KeptPlan(plan=plan):
            recorder.plan(plan, time.time())
        case KeptStep(step=step):
            recorder.known_step(step)
        case KeptPart(part=part):
            recorder.known_part(part, time.time())
        case KeptEvent(event=event):
            recorder.known_event(event)
        case KeptValue(key=key, value=value):
            recorder.set_meta(key, value)
        case KeptEvaluation():
            recorder.evaluation(item.step, item.at, item.loss, item.weight, item.seconds, item.values)
        case KeptPairs(pairs=pairs):
            recorder.pairs(pairs)
        case KeptSample(sample=sample):
            recorder.sample(sample)
        case KeptDrifts():
            recorder.drifts(item.step, item.at, dict(zip(item.ranks, item.drifts, strict=True)))
        case KeptRetraction():
            recorder.retract_after(item.after_step, item.after_event)
            checkpoints.supersede(RunPaths(recorder.path.parent).checkpoints, item.after_step)
        case KeptCommand():
            pass  # in the agent's own journal


class EndedRun:
    """A run that has ended, by this node's record: where that ends, and what it has beyond another node's. Open until
    it is closed. Raises InvalidInputError if the record can't be used."""

    def __init__(self, row: KnownRun, rank: int | None) -> None:
        """`rank` is this node's, None if it has none."""
        self.row, self.paths, self._rank = row, RunPaths(row.directory), rank
        self._recorder = RunDb(self.paths, resumable=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.close()

    @property
    def run(self) -> str:
        return self.row.run

    @property
    def hosted(self) -> HostedRank:
        """Return how far the record goes."""
        return HostedRank(self.run, self._rank or 0, None, *self._recorder.newest())

    @property
    def is_conductable(self) -> bool:
        """Return whether what its conductor kept was handed on to this node."""
        return self._recorder.meta(DURABLE_KEY) is not None

    def keep(self, items: Sequence[bytes]) -> list[KeptCommand]:
        """Keep what another node has kept; return its commands, which are the agent's. Raises ProtocolError."""
        return keep_all(self._recorder, items)

    def beyond(self, other: HostedRank) -> list[Kept]:
        """Return what this record has and a claimant's hasn't. Raises RefusedError if that is much."""
        return beyond(self._recorder, self.paths, self.hosted, other)
