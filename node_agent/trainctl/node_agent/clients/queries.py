"""Queries: one handler for each request that changes nothing; they read the record in a thread."""

import asyncio
import time
from typing import Any

import zmq

from trainctl.node_agent.clients import forwarded_queries, run_queries
from trainctl.node_agent.clients.query_context import (
    QueryContext,
    UnknownRankError,
    UnknownRunError,
    from_record,
    run_paths,
)
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import (
    METRICS,
    AgentReply,
    AttendRequest,
    Audit,
    AuditRequest,
    DiagnosisRequest,
    DigestsRequest,
    DiskRequest,
    DryRunRequest,
    EditRun,
    Events,
    EventsRequest,
    FactsRequest,
    GapFill,
    GapRequest,
    History,
    HistoryRequest,
    HookTest,
    HookTestRequest,
    Hosts,
    HostsRequest,
    LogRequest,
    Pairs,
    PairsRequest,
    PoliciesRequest,
    Query,
    RecordRequest,
    Refusal,
    RunEdited,
    RunsRequest,
    Samples,
    SamplesRequest,
    SnapshotRequest,
    StepProfiles,
    StepProfilesRequest,
    Steps,
    StepsRequest,
    TraceRequest,
    Viewers,
)
from trainctl.protocol.record.reader import RecordReader

GAP_LIMIT = 400


async def reply(request: Query, source: QueryContext) -> AgentReply:
    """The reply to a query, a refusal if there is no other."""
    try:
        return await _answer(request, source)
    except InvalidInputError as error:
        code: Any = {UnknownRunError: "unknown-run", UnknownRankError: "unknown-rank"}.get(type(error), "malformed")
        return Refusal(rid=request.rid, code=code, text=str(error))
    except (OSError, zmq.ZMQError) as error:  # no descriptor is free, say
        return Refusal(rid=request.rid, code="busy", text=f"{source.node} cannot answer now: {error}")


async def _answer(request: Query, source: QueryContext) -> AgentReply:
    match request:
        case SnapshotRequest():
            return await run_queries.snapshot(request, source)
        case HistoryRequest():
            return await _history(request, source)
        case GapRequest():
            return _gap(request, source)
        case RunsRequest():
            return await run_queries.runs(request, source)
        case EventsRequest():
            return await _events(request, source)
        case StepsRequest():
            return await _steps(request, source)
        case HostsRequest():
            return await _hosts(request, source)
        case SamplesRequest():
            return await _samples(request, source)
        case StepProfilesRequest():
            return await _traces(request, source)
        case TraceRequest():
            return await forwarded_queries.trace(request, source)
        case RecordRequest():
            return await source.record_copies.part(request, run_paths(request.run, source))
        case PairsRequest():
            return await _pairs(request, source)
        case PoliciesRequest():
            return await forwarded_queries.policies(request, source)
        case DryRunRequest():
            return await forwarded_queries.dry_run(request, source)
        case DiagnosisRequest():
            return await forwarded_queries.diagnosis(request, source)
        case LogRequest():
            return await forwarded_queries.log(request, source)
        case AttendRequest():
            return Viewers(rid=request.rid, viewers=source.presence.hear(request, time.monotonic(), time.time()))
        case FactsRequest():
            return await source.doctor.facts(request)
        case DigestsRequest():
            return await source.doctor.digests(request)
        case DiskRequest():
            return await source.doctor.disk(request)
        case AuditRequest():
            return Audit(rid=request.rid, refused=source.refusals(request.limit))
        case HookTestRequest():
            return HookTest(rid=request.rid, outcomes=await source.test_hooks(request.rid))
        case EditRun(run=run, name=name):
            if name is None:
                return RunEdited(rid=request.rid, freed_bytes=await source.remove_run(run))
            await source.rename_run(run, name)
            return RunEdited(rid=request.rid, freed_bytes=0)


async def _history(request: HistoryRequest, source: QueryContext) -> History:
    paths = run_paths(request.run, source)

    def read() -> History:
        with RecordReader(paths) as reader:
            for metric in request.metrics:
                reader.check_metric(metric)
            wanted = [(metric, rank) for metric in request.metrics for rank in reader.series_ranks(metric)]
            found = [
                reader.series(metric, rank, request.first_step, request.last_step, request.columns)
                for metric, rank in wanted
            ]
            series = tuple(one for one in found if one.steps or one.metric in METRICS)
            return History(
                rid=request.rid, series=series, own_metrics=reader.own_metrics(), values_from=reader.values_from()
            )

    return await asyncio.to_thread(read)


def _gap(request: GapRequest, source: QueryContext) -> GapFill:
    kept = None
    if request.boot == source.publisher.boot:
        kept = source.publisher.again(request.first_seq, request.last_seq, GAP_LIMIT)
    return GapFill(rid=request.rid, complete=kept is not None, messages=kept or ())


async def _events(request: EventsRequest, source: QueryContext) -> Events:
    paths = run_paths(request.run, source)
    events, more = await from_record(
        paths, lambda reader: reader.events(request.after_id, request.limit, request.newest)
    )
    return Events(rid=request.rid, run=paths.directory.name, events=tuple(events), more=more)


async def _steps(request: StepsRequest, source: QueryContext) -> Steps:
    paths = run_paths(request.run, source)
    steps, more = await from_record(paths, lambda reader: reader.steps(request.after_step, request.limit))
    return Steps(rid=request.rid, run=paths.directory.name, steps=tuple(steps), more=more)


async def _hosts(request: HostsRequest, source: QueryContext) -> Hosts:
    paths = run_paths(request.run, source)
    readings, last = await from_record(paths, lambda reader: reader.host_readings(request.after_row, request.limit))
    place = last or request.after_row
    return Hosts(rid=request.rid, run=paths.directory.name, readings=readings, last_row=place, more=last > 0)


async def _samples(request: SamplesRequest, source: QueryContext) -> Samples:
    paths = run_paths(request.run, source)
    found, last, more = await from_record(
        paths, lambda reader: reader.samples(request.after_row, request.limit, request.newest)
    )
    return Samples(rid=request.rid, run=paths.directory.name, samples=found, last_row=last, more=more)


async def _traces(request: StepProfilesRequest, source: QueryContext) -> StepProfiles:
    paths = run_paths(request.run, source)
    found = await from_record(paths, lambda reader: reader.newest_events(request.limit, kind="profile"))
    return StepProfiles(rid=request.rid, run=paths.directory.name, profiles=found)


async def _pairs(request: PairsRequest, source: QueryContext) -> Pairs:
    paths = run_paths(request.run, source)
    found = await from_record(paths, lambda reader: reader.held_out_pairs(request.limit))
    return Pairs(rid=request.rid, run=paths.directory.name, evaluations=found)
