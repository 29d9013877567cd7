"""Queries: one handler for each request that changes nothing; they read the record in a thread."""

import asyncio
import math
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
import zmq

from trainctl.node_agent.clients import proxy
from trainctl.node_agent.clients.doctor import Doctor
from trainctl.node_agent.clients.presence import Presence
from trainctl.node_agent.records.keys import VIEW_KEY
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import LiveFacts
from trainctl.protocol.analysis.diagnosis.record_facts import config_of, facts_of_record
from trainctl.protocol.batch import cost
from trainctl.protocol.batch.run_rates import run_rates
from trainctl.protocol.client.client import Client
from trainctl.protocol.config.policies import AUTHOR
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import RANK_SERIES, RUN_SERIES
from trainctl.protocol.record.schema import DAMAGED
from trainctl.protocol.security.keyring import Keyring

T = TypeVar("T")
GAP_LIMIT = 400
SNAPSHOT_EVENTS = 100
SNAPSHOT_BUCKETS = 20_000
"""Most buckets in one snapshot, over all series: about 40 bytes each, which keeps it below the frame limit."""
ELSEWHERE_SECONDS = 3.0
"""Seconds another node's agent may take to answer a forwarded request; a client waits longer."""


class LiveRun(NamedTuple):
    """An active run as its agent has it in memory."""

    view: m.RunView
    last_step: m.StepCommitted | None
    rank_steps: tuple[m.RankStep, ...]
    alerts: m.Alerts | None


class QuerySource(Protocol):
    """What the handlers see of the agent."""

    publisher: Publisher
    presence: Presence
    doctor: Doctor

    @property
    def node(self) -> str: ...
    def node_view(self) -> m.NodeView: ...
    def peer_views(self) -> tuple[m.PeerView, ...]: ...
    def address_of(self, node: str) -> str | None: ...
    def live_run(self, directory: Path) -> LiveRun | None: ...
    def live_runs(self) -> tuple[LiveRun, ...]: ...
    def run_directory(self, run: str | None) -> Path | None: ...
    def run_summaries(self) -> list[tuple[str, str, str, m.RunState, float]]: ...
    def ended_as(self, run: str) -> tuple[m.RunState, str]: ...
    def led_elsewhere(self, run: str) -> str | None: ...
    def now(self) -> float: ...
    def alerts(self) -> m.Alerts: ...
    def policy_statuses(self, directory: Path) -> tuple[m.PolicyStatus, ...] | None: ...
    def live_facts(self, directory: Path) -> LiveFacts | None: ...
    def refusals(self, limit: int) -> tuple[m.Refused, ...]: ...
    @property
    def keys(self) -> Keyring | None: ...


class UnknownRunError(InvalidInputError):
    """A request named a run that this agent doesn't know."""


class UnknownRankError(InvalidInputError):
    """A request named a rank of which this agent has nothing, and can get nothing."""


async def reply(request: m.ClientRequest, source: QuerySource) -> m.AgentReply:
    """The reply to any request but a command, a refusal if there is no other."""
    try:
        return await _answer(request, source)
    except InvalidInputError as error:
        code: Any = {UnknownRunError: "unknown-run", UnknownRankError: "unknown-rank"}.get(type(error), "malformed")
        return m.Refusal(rid=request.rid, code=code, text=str(error))
    except (OSError, zmq.ZMQError) as error:  # no descriptor is free, say
        return m.Refusal(rid=request.rid, code="busy", text=f"{source.node} cannot answer now: {error}")


async def _answer(request: m.ClientRequest, source: QuerySource) -> m.AgentReply:
    match request:
        case m.SnapshotRequest():
            return await _snapshot(request, source)
        case m.HistoryRequest():
            return await _history(request, source)
        case m.GapRequest():
            return _gap(request, source)
        case m.RunsRequest():
            return await _runs(request, source)
        case m.EventsRequest():
            return await _events(request, source)
        case m.StepsRequest():
            return await _steps(request, source)
        case m.HostsRequest():
            return await _hosts(request, source)
        case m.SamplesRequest():
            return await _samples(request, source)
        case m.TracesRequest():
            return await _traces(request, source)
        case m.TraceRequest():
            return await _trace(request, source)
        case m.PairsRequest():
            return await _pairs(request, source)
        case m.PoliciesRequest():
            return await _policies(request, source)
        case m.DiagnosisRequest():
            return await _diagnosis(request, source)
        case m.LogRequest():
            return await _log(request, source)
        case m.AttendRequest():
            return m.Viewers(rid=request.rid, viewers=source.presence.hear(request, time.monotonic(), source.now()))
        case m.FactsRequest():
            return await source.doctor.facts(request)
        case m.DigestsRequest():
            return await source.doctor.digests(request)
        case m.DiskRequest():
            return await source.doctor.disk(request)
        case m.AuditRequest():
            return m.Audit(rid=request.rid, refused=source.refusals(request.limit))
        case m.AttachRun() | m.RunSteps() | m.EndRun():
            raise AssertionError("messages from attached runs go to GuestRuns")
        case (
            m.WorksRequest() | m.OpenWork() | m.WorkRows() | m.WorkResultsRequest() | m.EndWork() | m.HostWork()
            | m.WorkFileRequest() | m.SliceRequest()
        ):  # fmt: skip
            raise AssertionError("requests about separate work go to WorkLead")
        case m.CalibrateRequest() | m.ProfilesRequest() | m.LinkRequest():
            raise AssertionError("requests about calibrations go to CalibrationHost")
        case m.Command():
            raise AssertionError("commands go through the command journal")


async def _snapshot(request: m.SnapshotRequest, source: QuerySource) -> m.Snapshot:
    """`seq` is read before the record: what is published meanwhile may be in both, and clients drop a known step."""
    seq, boot = source.publisher.seq, source.publisher.boot
    directory = source.run_directory(request.run)
    if directory is None:
        if request.run is not None:
            raise UnknownRunError("run", f"no run {request.run!r} on this node")
        made = _snapshot_of(request, source, boot, seq, None, None, (), (), ())
        return msgspec.structs.replace(made, alerts=source.alerts())
    try:
        read = await asyncio.to_thread(_read_snapshot, RunPaths(directory), request.columns)
    except InvalidInputError as error:
        if request.run is not None and source.live_run(directory) is None:
            raise
        read = None, (), (_unreadable(directory.name, error, source.now()),), (), None
    last, parts, events, series, kept = read
    live = source.live_run(directory)
    view = live.view if live is not None else await _as_ended(kept, last, source)
    if live is not None and live.last_step is not None:
        last, parts = live.last_step, tuple(sorted(live.rank_steps, key=lambda part: part.rank))
    made = _snapshot_of(request, source, boot, seq, view, last, parts, events, series)
    if live is None and request.run is not None:
        return made
    return msgspec.structs.replace(made, alerts=live.alerts if live is not None else source.alerts())


def _unreadable(run: str, error: InvalidInputError, at: float) -> m.Event:
    """Stands for what a record can't tell: the agent itself answers all the same."""
    return m.Event(id=0, at=at, severity="error", by="auto", data=Notice(f"{run}: {error}"), run=run)


async def _as_ended(kept: m.RunView | None, last: m.StepCommitted | None, source: QuerySource) -> m.RunView | None:
    """The last view that was kept, which may be from before the end when the agent was killed; of a run that is led
    elsewhere, the view there."""
    if kept is None:
        return None
    state, reason = source.ended_as(kept.run)
    view = msgspec.structs.replace(
        kept, state=state, reason=reason or kept.reason, cost=_cost_of_record(kept, state, last)
    )
    return await proxy.view(view, source)


def _snapshot_of(
    request: m.SnapshotRequest, source: QuerySource, boot: str, seq: int, view: m.RunView | None,
    last: m.StepCommitted | None, parts: tuple[m.RankStep, ...], events: tuple[m.Event, ...],
    series: tuple[m.Series, ...],
) -> m.Snapshot:  # fmt: skip
    return m.Snapshot(
        rid=request.rid, boot=boot, seq=seq, at=source.now(), node=source.node_view(), run=view, last_step=last,
        rank_steps=parts, events=events, series=series, peers=source.peer_views(),
        runs=tuple(_live_summary(one) for one in source.live_runs()),
    )  # fmt: skip


_Read = tuple[
    m.StepCommitted | None, tuple[m.RankStep, ...], tuple[m.Event, ...], tuple[m.Series, ...], m.RunView | None
]


def _read_snapshot(paths: RunPaths, columns: int) -> _Read:
    with RecordReader(paths) as reader:
        last = reader.last_step()
        parts = reader.rank_steps(last.step) if last is not None else ()
        events, _ = reader.events(limit=SNAPSHOT_EVENTS, newest=True)
        series: list[m.Series] = []
        view = _view_of(reader)
        if columns:
            ranks, of_run = reader.ranks(), {*RUN_SERIES, *([view.rate_metric] if view is not None else [])}
            columns = min(columns, SNAPSHOT_BUCKETS // (len(of_run) + len(RANK_SERIES) * len(ranks)))
            series += [reader.series(metric, None, 0, None, columns) for metric in sorted(of_run)]
            series += [reader.series(metric, rank, 0, None, columns) for metric in RANK_SERIES for rank in ranks]
    return last, tuple(parts), tuple(events), tuple(series), view


async def _history(request: m.HistoryRequest, source: QuerySource) -> m.History:
    paths = _paths(request.run, source)

    def read() -> m.History:
        with RecordReader(paths) as reader:
            for metric in request.metrics:
                reader.check_metric(metric)
            wanted = [(metric, rank) for metric in request.metrics for rank in reader.series_ranks(metric)]
            found = [
                reader.series(metric, rank, request.first_step, request.last_step, request.columns)
                for metric, rank in wanted
            ]
            series = tuple(one for one in found if one.steps or one.metric in m.METRICS)
            return m.History(
                rid=request.rid, series=series, own_metrics=reader.own_metrics(), values_from=reader.values_from()
            )

    return await asyncio.to_thread(read)


def _gap(request: m.GapRequest, source: QuerySource) -> m.GapFill:
    kept = None
    if request.boot == source.publisher.boot:
        kept = source.publisher.again(request.first_seq, request.last_seq, GAP_LIMIT)
    return m.GapFill(rid=request.rid, complete=kept is not None, messages=kept or ())


async def _runs(request: m.RunsRequest, source: QuerySource) -> m.Runs:
    rows = source.run_summaries()
    summaries = await asyncio.to_thread(lambda: [_summary(*row) for row in rows])
    return m.Runs(rid=request.rid, runs=tuple(await proxy.summaries(summaries, source)))


def _summary(run: str, name: str, directory: str, state: m.RunState, started_at: float) -> m.RunSummary:
    last, view = None, None
    try:
        with RecordReader(RunPaths(Path(directory))) as reader:
            last = reader.last_step()
            view = _view_of(reader)
    except InvalidInputError:
        pass  # damaged, or its directory was moved away: the db's line is all there is
    return m.RunSummary(
        run=run, name=name, state=state, step=last.step if last else view.step if view else 0,
        steps=view.steps if view else None, last_loss=_last_loss(last), started_at=started_at, directory=directory,
        lead=view.lead if view else "", nodes=_nodes(view) if view else (),
        last_step_at=last.committed_at if last else None, kind=view.kind if view else "hosted",
        rates=run_rates(msgspec.structs.replace(view, state=state), last) if view else None,
        cost=_cost_of_record(view, state, last) if view else None, cursor=last.cursor if last else None,
        simulated=view.simulated if view else False, branch=view.branch if view else None,
    )  # fmt: skip


def _live_summary(live: LiveRun) -> m.RunSummary:
    """The same of what the agent has in memory."""
    view, last = live.view, live.last_step
    return m.RunSummary(
        run=view.run, name=view.name, state=view.state, step=view.step, steps=view.steps, last_loss=_last_loss(last),
        started_at=view.started_at, directory=view.directory, lead=view.lead, nodes=_nodes(view),
        last_step_at=last.committed_at if last else None, kind=view.kind, rates=run_rates(view, last),
        cost=view.cost, cursor=last.cursor if last else None, simulated=view.simulated, branch=view.branch,
    )  # fmt: skip


def _cost_of_record(view: m.RunView, state: m.RunState, last: m.StepCommitted | None) -> m.RunCost | None:
    """By the record. Of a run whose agent ended with it, only up to the last step."""
    if view.cost is None or state in m.ACTIVE_RUN_STATES:
        return view.cost
    return cost.ended(view.cost, last.committed_at if last is not None else view.cost.at)


def _nodes(view: m.RunView) -> tuple[str, ...]:
    return tuple(dict.fromkeys(rank.node for rank in view.ranks))


def _last_loss(last: m.StepCommitted | None) -> float | None:
    loss = last.loss if last is not None else None
    return loss if loss is not None and math.isfinite(loss) else None


async def _from_record(paths: RunPaths, read: Callable[[RecordReader], T]) -> T:
    """What `read` gives, in a thread."""

    def reading() -> T:
        with RecordReader(paths) as reader:
            return read(reader)

    return await asyncio.to_thread(reading)


async def _events(request: m.EventsRequest, source: QuerySource) -> m.Events:
    paths = _paths(request.run, source)
    events, more = await _from_record(
        paths, lambda reader: reader.events(request.after_id, request.limit, request.newest)
    )  # fmt: skip
    return m.Events(rid=request.rid, run=paths.directory.name, events=tuple(events), more=more)


async def _steps(request: m.StepsRequest, source: QuerySource) -> m.Steps:
    paths = _paths(request.run, source)
    steps, more = await _from_record(paths, lambda reader: reader.steps(request.after_step, request.limit))
    return m.Steps(rid=request.rid, run=paths.directory.name, steps=tuple(steps), more=more)


async def _hosts(request: m.HostsRequest, source: QuerySource) -> m.Hosts:
    paths = _paths(request.run, source)
    readings, last = await _from_record(paths, lambda reader: reader.host_readings(request.after_row, request.limit))
    place = last or request.after_row
    return m.Hosts(rid=request.rid, run=paths.directory.name, readings=readings, last_row=place, more=last > 0)


async def _samples(request: m.SamplesRequest, source: QuerySource) -> m.Samples:
    paths = _paths(request.run, source)
    found, last, more = await _from_record(
        paths, lambda reader: reader.samples(request.after_row, request.limit, request.newest)
    )  # fmt: skip
    return m.Samples(rid=request.rid, run=paths.directory.name, samples=found, last_row=last, more=more)


async def _traces(request: m.TracesRequest, source: QuerySource) -> m.Traces:
    paths = _paths(request.run, source)
    found = await _from_record(paths, lambda reader: reader.newest_events(request.limit, kind="profile"))
    return m.Traces(rid=request.rid, run=paths.directory.name, profiles=found)


async def _trace(request: m.TraceRequest, source: QuerySource) -> m.TracePart:
    """From this node's disk, or from the agent of the node that has it."""
    if request.node != source.node:
        return await _trace_elsewhere(request, source)
    path = _paths(request.run, source).profiles / request.file
    return await asyncio.to_thread(_read_trace, request, path)


def _read_trace(request: m.TraceRequest, path: Path) -> m.TracePart:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(request.offset_bytes, size))
            data = file.read(m.TRACE_PART_BYTES)
    except FileNotFoundError:
        problem = f"{request.node} no longer has {request.file}: only the newest traces are kept; profile again"
        raise InvalidInputError("file", problem) from None
    except OSError as error:
        problem = f"{request.node} can't read {request.file}: {error.strerror or error}"
        raise InvalidInputError("file", problem) from None
    return m.TracePart(rid=request.rid, offset_bytes=request.offset_bytes, size_bytes=size, data=data)


async def _trace_elsewhere(request: m.TraceRequest, source: QuerySource) -> m.TracePart:
    address = source.address_of(request.node)
    if address is None:
        raise InvalidInputError("node", f"{request.node} is unreachable: its traces cannot be read")
    try:
        async with Client(address, timeout_seconds=ELSEWHERE_SECONDS, keys=source.keys) as client:
            part = await client.trace_part(request.run, request.node, request.file, request.offset_bytes)
    except TrainctlError as error:
        raise InvalidInputError("node", f"{request.node}: {error}") from None
    return msgspec.structs.replace(part, rid=request.rid)


async def _pairs(request: m.PairsRequest, source: QuerySource) -> m.Pairs:
    paths = _paths(request.run, source)
    found = await _from_record(paths, lambda reader: reader.held_out_pairs(request.limit))
    return m.Pairs(rid=request.rid, run=paths.directory.name, evaluations=found)


async def _policies(request: m.PoliciesRequest, source: QuerySource) -> m.Policies:
    """From the agent that leads the run. The newest commands come from the record."""
    paths = _paths(request.run, source)
    live, run = source.live_run(paths.directory), paths.directory.name
    if live is None:
        raise InvalidInputError("run", f"{run} isn't active: its policies see nothing until it is resumed")
    if live.view.recording:
        raise InvalidInputError("run", f"{run} is a played recording: policies see something only in a live run")
    statuses = source.policy_statuses(paths.directory)
    if statuses is None:
        return await _policies_elsewhere(request, live.view, source)

    def read(reader: RecordReader) -> tuple[m.PolicyStatus, ...]:
        return tuple(msgspec.structs.replace(one, actions=reader.commands_by(AUTHOR + one.name)) for one in statuses)

    return m.Policies(rid=request.rid, run=run, step=live.view.step, policies=await _from_record(paths, read))


async def _policies_elsewhere(request: m.PoliciesRequest, view: m.RunView, source: QuerySource) -> m.Policies:
    if view.kind != "hosted":
        raise InvalidInputError("run", f"{view.run} is trained by another program: it has no policies")
    found = await _ask_lead(view, source, lambda client: client.policies(view.run))
    return msgspec.structs.replace(found, rid=request.rid)


async def _ask_lead(view: m.RunView, source: QuerySource, question: Callable[[Client], Awaitable[T]]) -> T:
    """The answer of the agent that leads a run. Raises InvalidInputError if it can't be had."""
    address = source.address_of(view.lead)
    if address is None:
        raise InvalidInputError("run", f"{view.lead}, which leads {view.run}, is unreachable: try again later")
    try:
        async with Client(address, timeout_seconds=ELSEWHERE_SECONDS, keys=source.keys) as client:
            return await question(client)
    except TrainctlError as error:
        raise InvalidInputError("run", f"{view.lead} leads {view.run}: {error}") from None


async def _diagnosis(request: m.DiagnosisRequest, source: QuerySource) -> m.DiagnosisReply:
    """Of a run as it is now by the agent that leads it, and else by the record."""
    paths = _paths(request.run, source)
    run, live = paths.directory.name, source.live_run(paths.directory)
    facts = source.live_facts(paths.directory) if request.last_step is None else None
    is_led_elsewhere = live is not None and live.view.kind == "hosted" and not live.view.recording and facts is None
    if live is not None and is_led_elsewhere and request.last_step is None:
        found = await _ask_lead(live.view, source, lambda client: client.diagnosis(run))
        return msgspec.structs.replace(found, rid=request.rid)
    at = source.now() if facts is not None else None

    def read(reader: RecordReader) -> m.Diagnosis:
        known = facts_of_record(reader, config_of(paths), live=facts, at=at, last_step=request.last_step)
        return diagnose(known)

    diagnosis = await _from_record(paths, read)
    return m.DiagnosisReply(rid=request.rid, run=run, live=facts is not None, diagnosis=diagnosis)


async def _log(request: m.LogRequest, source: QuerySource) -> m.LogPart:
    paths = _paths(request.run, source)
    file, run = paths.log(request.rank), paths.directory.name
    if not file.is_file():
        return await _log_elsewhere(msgspec.structs.replace(request, run=run), paths, source)

    def read() -> tuple[int, int, str]:
        size = file.stat().st_size
        offset = max(0, size + request.offset_bytes) if request.offset_bytes < 0 else min(request.offset_bytes, size)
        with file.open("rb") as stream:
            stream.seek(offset)
            return offset, size, stream.read(request.limit_bytes).decode("utf-8", "replace")

    offset, size, text = await asyncio.to_thread(read)
    return m.LogPart(rid=request.rid, run=run, rank=request.rank, offset_bytes=offset, size_bytes=size, text=text)


async def _log_elsewhere(request: m.LogRequest, paths: RunPaths, source: QuerySource) -> m.LogPart:
    """From the agent of the node that hosts the rank, or that knows which one does."""
    live = source.live_run(paths.directory)
    view = live.view if live is not None else await asyncio.to_thread(_kept_view, paths)
    if view is None:
        raise UnknownRankError("rank", f"run {request.run} has no log for rank {request.rank}")
    node = next((rank.node for rank in view.ranks if rank.rank == request.rank), None)
    address = source.address_of(node or view.lead)  # a follower knows its own rank only
    if node is None and address is None:
        known = ", ".join(str(rank) for rank in sorted(rank.rank for rank in view.ranks))
        raise UnknownRankError("rank", f"no rank {request.rank} in this run; the ranks are {known}")
    if address is None:
        raise UnknownRankError("rank", f"{request.rank} is on {node} (unreachable): its log cannot be read")
    try:
        async with Client(address, timeout_seconds=ELSEWHERE_SECONDS, keys=source.keys) as client:
            part = await client.log(request.run, request.rank, request.offset_bytes, request.limit_bytes)
    except TrainctlError as error:
        problem = f"{request.rank} is on {node}: {error}" if node else str(error).removeprefix("rank: ")
        raise UnknownRankError("rank", problem) from None
    return msgspec.structs.replace(part, rid=request.rid)


def _kept_view(paths: RunPaths) -> m.RunView | None:
    with RecordReader(paths) as reader:
        return _view_of(reader)


def _view_of(reader: RecordReader) -> m.RunView | None:
    text = reader.meta(VIEW_KEY)
    try:
        return msgspec.json.decode(text, type=m.RunView) if text is not None else None
    except msgspec.DecodeError as error:
        raise InvalidInputError(str(reader.path), f"cannot be read: {error}; {DAMAGED}") from None


def _paths(run: str | None, source: QuerySource) -> RunPaths:
    directory = source.run_directory(run)
    if directory is None:
        raise UnknownRunError(
            "run", "no run yet; start one with trainctl run" if run is None else f"no run {run!r} on this node"
        )
    return RunPaths(directory)
