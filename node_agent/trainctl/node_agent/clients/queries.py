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
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.reader import RecordReader

GAP_LIMIT = 400


async def reply(request: m.Query, source: QueryContext) -> m.AgentReply:
    """The reply to a query, a refusal if there is no other."""
    try:
        return await _answer(request, source)
    except InvalidInputError as error:
        code: Any = {UnknownRunError: "unknown-run", UnknownRankError: "unknown-rank"}.get(type(error), "malformed")
        return m.Refusal(rid=request.rid, code=code, text=str(error))
    except (OSError, zmq.ZMQError) as error:  # no descriptor is free, say
        return m.Refusal(rid=request.rid, code="busy", text=f"{source.node} cannot answer now: {error}")


async def _answer(request: m.Query, source: QueryContext) -> m.AgentReply:
    match request:
        case m.SnapshotRequest():
            return await run_queries.snapshot(request, source)
        case m.HistoryRequest():
            return await _history(request, source)
        case m.GapRequest():
            return _gap(request, source)
        case m.RunsRequest():
            return await run_queries.runs(request, source)
        case m.EventsRequest():
            return await _events(request, source)
        case m.StepsRequest():
            return await _steps(request, source)
        case m.HostsRequest():
            return await _hosts(request, source)
        case m.SamplesRequest():
            return await _samples(request, source)
        case m.StepProfilesRequest():
            return await _traces(request, source)
        case m.TraceRequest():
            return await forwarded_queries.trace(request, source)
        case m.RecordRequest():
            return await source.record_copies.part(request, run_paths(request.run, source))
        case m.PairsRequest():
            return await _pairs(request, source)
        case m.PoliciesRequest():
            return await forwarded_queries.policies(request, source)
        case m.DryRunRequest():
            return await forwarded_queries.dry_run(request, source)
        case m.DiagnosisRequest():
            return await forwarded_queries.diagnosis(request, source)
        case m.LogRequest():
            return await forwarded_queries.log(request, source)
        case m.AttendRequest():
            return m.Viewers(rid=request.rid, viewers=source.presence.hear(request, time.monotonic(), time.time()))
        case m.FactsRequest():
            return await source.doctor.facts(request)
        case m.DigestsRequest():
            return await source.doctor.digests(request)
        case m.DiskRequest():
            return await source.doctor.disk(request)
        case m.AuditRequest():
            return m.Audit(rid=request.rid, refused=source.refusals(request.limit))
        case m.HookTestRequest():
            return m.HookTest(rid=request.rid, outcomes=await source.test_hooks(request.rid))
        case m.EditRun(run=run, name=name):
            if name is None:
                return m.RunEdited(rid=request.rid, freed_bytes=await source.remove_run(run))
            await source.rename_run(run, name)
            return m.RunEdited(rid=request.rid, freed_bytes=0)


async def _history(request: m.HistoryRequest, source: QueryContext) -> m.History:
    paths = run_paths(request.run, source)

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


def _gap(request: m.GapRequest, source: QueryContext) -> m.GapFill:
    kept = None
    if request.boot == source.publisher.boot:
        kept = source.publisher.again(request.first_seq, request.last_seq, GAP_LIMIT)
    return m.GapFill(rid=request.rid, complete=kept is not None, messages=kept or ())


async def _events(request: m.EventsRequest, source: QueryContext) -> m.Events:
    paths = run_paths(request.run, source)
    events, more = await from_record(
        paths, lambda reader: reader.events(request.after_id, request.limit, request.newest)
    )
    return m.Events(rid=request.rid, run=paths.directory.name, events=tuple(events), more=more)


async def _steps(request: m.StepsRequest, source: QueryContext) -> m.Steps:
    paths = run_paths(request.run, source)
    steps, more = await from_record(paths, lambda reader: reader.steps(request.after_step, request.limit))
    return m.Steps(rid=request.rid, run=paths.directory.name, steps=tuple(steps), more=more)


async def _hosts(request: m.HostsRequest, source: QueryContext) -> m.Hosts:
    paths = run_paths(request.run, source)
    readings, last = await from_record(paths, lambda reader: reader.host_readings(request.after_row, request.limit))
    place = last or request.after_row
    return m.Hosts(rid=request.rid, run=paths.directory.name, readings=readings, last_row=place, more=last > 0)


async def _samples(request: m.SamplesRequest, source: QueryContext) -> m.Samples:
    paths = run_paths(request.run, source)
    found, last, more = await from_record(
        paths, lambda reader: reader.samples(request.after_row, request.limit, request.newest)
    )
    return m.Samples(rid=request.rid, run=paths.directory.name, samples=found, last_row=last, more=more)


async def _traces(request: m.StepProfilesRequest, source: QueryContext) -> m.StepProfiles:
    paths = run_paths(request.run, source)
    found = await from_record(paths, lambda reader: reader.newest_events(request.limit, kind="profile"))
    return m.StepProfiles(rid=request.rid, run=paths.directory.name, profiles=found)


async def _pairs(request: m.PairsRequest, source: QueryContext) -> m.Pairs:
    paths = run_paths(request.run, source)
    found = await from_record(paths, lambda reader: reader.held_out_pairs(request.limit))
    return m.Pairs(rid=request.rid, run=paths.directory.name, evaluations=found)
