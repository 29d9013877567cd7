"""Queries of runs as a whole: a snapshot of one, and the list of all.

The state of a run that this node led but no longer takes part in comes from its present lead.
"""

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from trainctl.node_agent.clients.query_context import QueryContext, UnknownRunError, kept_view
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.protocol import messages
from trainctl.protocol.batch import cost
from trainctl.protocol.batch.cost import run_rates
from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.messages.requests import Request
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import RANK_SERIES, RUN_SERIES

R = TypeVar("R", bound=messages.Reply)
ANSWER_SECONDS = 2.0
"""Seconds the other agent may take to answer; the client of this one waits longer."""


async def _view_from_lead(known: messages.RunView, source: QueryContext) -> messages.RunView:
    """A run as its lead of now has it; where that can't be reached, as it was when it was handed over."""
    lead = source.led_elsewhere(known.run)
    if lead is None:
        return known
    snapshot = await _asked(lead, messages.SnapshotRequest(uuid.uuid4().hex, 0, known.run), source)
    if snapshot is not None and snapshot.run is not None:
        return msgspec.structs.replace(snapshot.run, directory=known.directory)
    reason = f"the run's lead {lead} is unreachable, so the run's state is unknown here"
    return msgspec.structs.replace(known, lead=lead, reason=reason)


async def _asked(node: str, request: Request[R], source: QueryContext) -> R | None:
    if any(peer.node == node and peer.state == "connected" for peer in source.peer_views()):
        with contextlib.suppress(TrainctlError):
            return await source.ask(node, request, ANSWER_SECONDS)
    return None


SNAPSHOT_EVENTS = 100
SNAPSHOT_BUCKETS = 20_000
"""Most buckets in one snapshot, over all series: about 40 bytes each, which keeps it below the frame limit."""


@dataclass(frozen=True)
class _Read:
    """Part of a snapshot that a run's record has."""

    last: messages.StepCommitted | None = None
    parts: tuple[messages.RankStep, ...] = ()
    events: tuple[messages.Event, ...] = ()
    series: tuple[messages.Series, ...] = ()
    view: messages.RunView | None = None


async def snapshot(request: messages.SnapshotRequest, source: QueryContext) -> messages.Snapshot:
    """`seq` is read before the record: what is published meanwhile may be in both, and clients drop a known step."""
    seq, boot = source.publisher.seq, source.publisher.boot
    directory = source.run_directory(request.run)
    if directory is None and request.run is not None:
        raise UnknownRunError("run", f"no run {request.run!r} on this node")
    read, live = _Read(), None
    if directory is not None:
        try:
            read = await asyncio.to_thread(_read, RunPaths(directory), request.columns)
        except InvalidInputError as error:
            if request.run is not None and source.live_run(directory) is None:
                raise
            read = _Read(events=(_unreadable(directory.name, error, time.time()),))
        live = source.live_run(directory)
    view = live.view if live is not None else await _as_ended(read, source)
    last, parts = read.last, read.parts
    if live is not None and live.last_step is not None:
        last, parts = live.last_step, tuple(sorted(live.rank_steps, key=lambda part: part.rank))
    own = source.alerts.view if request.run is None else None
    return messages.Snapshot(
        rid=request.rid,
        boot=boot,
        seq=seq,
        at=time.time(),
        node=source.node_view(),
        run=view,
        last_step=last,
        rank_steps=parts,
        events=read.events,
        series=read.series,
        peers=source.peer_views(),
        alerts=live.alerts if live is not None else own,
        runs=tuple(_summary_of(live.view, live.last_step) for live in source.live_runs()),
    )


def _unreadable(run: str, error: InvalidInputError, at: float) -> messages.Event:
    """Stands for what a record can't tell: the agent itself answers all the same."""
    return messages.Event(id=0, at=at, severity="error", by="auto", data=Notice(f"{run}: {error}"), run=run)


async def _as_ended(read: _Read, source: QueryContext) -> messages.RunView | None:
    """The last view that was kept, which may be from before the end when the agent was killed; of a run that is led
    elsewhere, the view there."""
    if read.view is None:
        return None
    known = source.known(read.view.run)
    view = msgspec.structs.replace(read.view, state=known.state, reason=known.reason or read.view.reason)
    return await _view_from_lead(_with_cost(view, read.last), source)


def _read(paths: RunPaths, columns: int) -> _Read:
    with RecordReader(paths) as reader:
        last = reader.last_step()
        parts = reader.rank_steps(last.step) if last is not None else ()
        events, _ = reader.events(limit=SNAPSHOT_EVENTS, newest=True)
        series: list[messages.Series] = []
        view = kept_view(reader)
        if columns:
            ranks, of_run = reader.ranks(), {*RUN_SERIES, *([view.rate_metric] if view is not None else [])}
            columns = min(columns, SNAPSHOT_BUCKETS // (len(of_run) + len(RANK_SERIES) * len(ranks)))
            series += [reader.series(metric, None, 0, None, columns) for metric in sorted(of_run)]
            series += [reader.series(metric, rank, 0, None, columns) for metric in RANK_SERIES for rank in ranks]
    return _Read(last, tuple(parts), tuple(events), tuple(series), view)


async def runs(request: messages.RunsRequest, source: QueryContext) -> messages.Runs:
    """Runs that other nodes lead are as they are there; where that is not known they are marked as stale."""
    known = source.known_runs()
    rows = await asyncio.to_thread(lambda: [_summary(row) for row in known])
    leads = {row.run: lead for row in rows if (lead := source.led_elsewhere(row.run)) is not None}
    nodes = sorted(set(leads.values()))
    replies = await asyncio.gather(*(_asked(node, messages.RunsRequest(uuid.uuid4().hex), source) for node in nodes))
    elsewhere = {(node, row.run): row for node, said in zip(nodes, replies, strict=True) if said for row in said.runs}
    for number, row in enumerate(rows):
        lead = leads.get(row.run)
        there = elsewhere.get((lead, row.run)) if lead is not None else None
        if there is not None:
            own = {"directory": row.directory, "name": row.name, "size_bytes": row.size_bytes}
            rows[number] = msgspec.structs.replace(there, **own)
        elif lead is not None:
            rows[number] = msgspec.structs.replace(row, lead=lead, stale=True)
    return messages.Runs(rid=request.rid, runs=tuple(rows))


def _summary(known: KnownRun) -> messages.RunSummary:
    last, view, paths = None, None, RunPaths(known.directory)
    with contextlib.suppress(InvalidInputError), RecordReader(paths) as reader:  # damaged, or moved away
        last = reader.last_step()
        view = kept_view(reader)
    step = last.step if last else view.step if view else 0
    if view is not None:
        made = _summary_of(_with_cost(msgspec.structs.replace(view, state=known.state, step=step), last), last)
    else:
        config = _config(paths)
        made = messages.RunSummary(
            run=known.run,
            name=known.name,
            state=known.state,
            step=step,
            steps=config.run.steps if config else None,
            global_batch=config.batch.global_ if config else None,
            last_loss=last.loss if last else None,
            started_at=known.started_at,
            directory="",
            last_step_at=last.committed_at if last else None,
            cursor=last.cursor if last else None,
        )
    own = {"name": known.name, "started_at": known.started_at, "directory": str(known.directory)}
    return msgspec.structs.replace(made, size_bytes=paths.size_bytes, **own)


def _config(paths: RunPaths) -> RunFile | None:
    """Return the run file of a run whose record has no view of it, or can't be read; None if that can't be either."""
    try:
        return run_file.read(paths.run_file)
    except InvalidInputError:
        return None


def _summary_of(view: messages.RunView, last: messages.StepCommitted | None) -> messages.RunSummary:
    return messages.RunSummary(
        run=view.run,
        name=view.name,
        state=view.state,
        step=view.step,
        steps=view.steps,
        last_loss=last.loss if last else None,
        started_at=view.started_at,
        directory=view.directory,
        lead=view.lead,
        nodes=tuple(dict.fromkeys(rank.node for rank in view.ranks)),
        last_step_at=last.committed_at if last else None,
        kind=view.kind,
        rates=run_rates(view, last),
        global_batch=view.global_batch,
        cost=view.cost,
        cursor=last.cursor if last else None,
        simulated=view.simulated,
        branch=view.branch,
    )


def _with_cost(view: messages.RunView, last: messages.StepCommitted | None) -> messages.RunView:
    """A run of the record with its cost. If its agent ended with it, that is known up to the last step only."""
    if view.cost is None or view.state in messages.ACTIVE_RUN_STATES:
        return view
    until = last.committed_at if last is not None else view.cost.at
    return msgspec.structs.replace(view, cost=cost.ended(view.cost, until))
