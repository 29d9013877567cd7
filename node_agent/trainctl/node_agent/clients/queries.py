"""Queries: one handler for each request that changes nothing. What another node's agent knows is asked there."""

import asyncio
import os
import time
from pathlib import Path
from typing import TypeVar, assert_never

import msgspec

from trainctl.node_agent.clients import run_queries
from trainctl.node_agent.clients.query_context import (
    QueryContext,
    UnknownRankError,
    from_record,
    kept_view,
    run_paths,
)
from trainctl.node_agent.conductor.views import dry_run
from trainctl.protocol import messages
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import config_of, facts_of_record
from trainctl.protocol.config.policies import AUTHOR
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.event_prose import result
from trainctl.protocol.messages.events import AnyEvent, LearningRateChanged
from trainctl.protocol.messages.requests import Request
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.security import received_names

R = TypeVar("R", bound=messages.Reply)
RecordQuery = (
    messages.HistoryRequest
    | messages.EventsRequest
    | messages.StepsRequest
    | messages.HostsRequest
    | messages.SamplesRequest
    | messages.StepProfilesRequest
    | messages.PairsRequest
)
GAP_LIMIT = 400


async def reply(request: messages.Query, source: QueryContext) -> messages.AgentReply:
    """Answer a query. Raises what stands against it."""
    match request:
        case messages.SnapshotRequest():
            return await run_queries.snapshot(request, source)
        case messages.RunsRequest():
            return await run_queries.runs(request, source)
        case messages.GapRequest():
            return _gap(request, source)
        case messages.RecordRequest():
            return await source.record_copies.part(request, run_paths(request.run, source))
        case messages.TraceRequest():
            return await _trace(request, source)
        case messages.PoliciesRequest():
            return await _policies(request, source)
        case messages.DryRunRequest():
            return await _dry_run(request, source)
        case messages.DiagnosisRequest():
            return await _diagnosis(request, source)
        case messages.LogRequest():
            return await _log(request, source)
        case messages.AttendRequest():
            return messages.Viewers(
                rid=request.rid, viewers=source.presence.hear(request, time.monotonic(), time.time())
            )
        case messages.FactsRequest():
            return await source.doctor.facts(request)
        case messages.DigestsRequest():
            return await source.doctor.digests(request)
        case messages.DiskRequest():
            return await source.doctor.disk(request)
        case messages.AuditRequest():
            return messages.Audit(rid=request.rid, refused=source.refusals(request.limit))
        case messages.HookTestRequest():
            return messages.HookTest(rid=request.rid, outcomes=await source.alerts.test_hooks(request.rid))
        case messages.EditRun(run=run, name=name):
            if name is None:
                return messages.RunEdited(rid=request.rid, freed_bytes=await source.remove_run(run))
            await source.rename_run(run, name)
            return messages.RunEdited(rid=request.rid, freed_bytes=0)
        case _:
            paths = run_paths(request.run, source)
            return await from_record(paths, lambda reader: _read(request, paths.directory.name, reader))


def _read(request: RecordQuery, run: str, reader: RecordReader) -> messages.AgentReply:
    rid = request.rid
    match request:
        case messages.HistoryRequest():
            return _history(request, reader)
        case messages.EventsRequest():
            events, more = reader.events(request.after_id, request.limit, request.newest)
            return messages.Events(rid=rid, run=run, events=tuple(events), more=more)
        case messages.StepsRequest():
            steps, more = reader.steps(request.after_step, request.limit)
            return messages.Steps(rid=rid, run=run, steps=tuple(steps), more=more)
        case messages.HostsRequest():
            readings, last = reader.host_readings(request.after_row, request.limit)
            return messages.Hosts(
                rid=rid, run=run, readings=readings, last_row=last or request.after_row, more=last > 0
            )
        case messages.SamplesRequest():
            samples, last, more = reader.samples(request.after_row, request.limit, request.newest)
            return messages.Samples(rid=rid, run=run, samples=samples, last_row=last, more=more)
        case messages.StepProfilesRequest():
            return messages.StepProfiles(rid=rid, run=run, profiles=reader.newest_events(request.limit, kind="profile"))
        case messages.PairsRequest():
            return messages.Pairs(rid=rid, run=run, evaluations=reader.held_out_pairs(request.limit))


def _history(request: messages.HistoryRequest, reader: RecordReader) -> messages.History:
    for metric in request.metrics:
        reader.check_metric(metric)
    first, last, columns = request.first_step, request.last_step, request.columns
    series = (
        reader.series(metric, rank, first, last, columns)
        for metric in request.metrics
        for rank in reader.series_ranks(metric)
    )
    return messages.History(
        rid=request.rid,
        series=tuple(one for one in series if one.steps or one.metric in messages.METRICS),
        own_metrics=reader.own_metrics(),
        values_from=reader.values_from(),
    )


def _gap(request: messages.GapRequest, source: QueryContext) -> messages.GapFill:
    kept = None
    if request.boot == source.publisher.boot:
        kept = source.publisher.again(request.first_seq, request.last_seq, GAP_LIMIT)
    return messages.GapFill(rid=request.rid, complete=kept is not None, messages=kept or ())


# ---------------------------------------------------------------- where another node's agent may know


async def _ask_lead(view: messages.RunView, request: Request[R], source: QueryContext) -> R:
    """Return the reply of the agent that leads a run. Raises InvalidInputError if there is none."""
    try:
        return await source.ask(view.lead, msgspec.structs.replace(request, run=view.run))
    except TrainctlError as error:
        raise InvalidInputError("run", f"{view.lead} leads {view.run}: {error}") from None


async def _trace(request: messages.TraceRequest, source: QueryContext) -> messages.TracePart:
    if request.node == source.node:
        return await asyncio.to_thread(_read_trace, request, run_paths(request.run, source).directory)
    try:
        return await source.ask(request.node, request)
    except TrainctlError as error:
        raise InvalidInputError("node", f"{request.node}: {error}") from None


def _read_trace(request: messages.TraceRequest, directory: Path) -> messages.TracePart:
    try:
        with received_names.opened(directory, "profiles", request.file) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(request.offset_bytes, size))
            data = file.read(messages.TRACE_PART_BYTES)
    except FileNotFoundError:
        problem = f"{request.node} no longer has {request.file}: only the newest traces are kept; profile again"
        raise InvalidInputError("file", problem) from None
    except OSError as error:
        problem = f"{request.node} can't read {request.file}: {error.strerror or error}"
        raise InvalidInputError("file", problem) from None
    return messages.TracePart(rid=request.rid, offset_bytes=request.offset_bytes, size_bytes=size, data=data)


async def _policies(request: messages.PoliciesRequest, source: QueryContext) -> messages.Policies:
    """Return what a run's policies see, by the agent that leads it, and their newest commands, by the record."""
    paths = run_paths(request.run, source)
    live, led, run = source.live_run(paths.directory), source.led(paths.directory), paths.directory.name
    if live is None:
        raise InvalidInputError("run", f"{run} isn't active: its policies see nothing until it is resumed")
    if led is None and live.view.kind != "hosted":
        raise InvalidInputError("run", f"{run} is trained by another program: it has no policies")
    if led is None:
        return await _ask_lead(live.view, request, source)
    statuses = led.conductor.proposals.policy_statuses()

    def read(reader: RecordReader) -> tuple[messages.PolicyStatus, ...]:
        return tuple(msgspec.structs.replace(one, actions=reader.commands_by(AUTHOR + one.name)) for one in statuses)

    return messages.Policies(rid=request.rid, run=run, step=live.view.step, policies=await from_record(paths, read))


async def _dry_run(request: messages.DryRunRequest, source: QueryContext) -> messages.DryRun:
    args = verbs.check(request.verb, request.args, request.node)
    if isinstance(args, verbs.AgentArgs):
        return await _agent_dry_run(request, args, source)
    directory = run_paths(request.run, source).directory
    live, led = source.live_run(directory), source.led(directory)
    if live is None:
        raise InvalidInputError("run", f"{directory.name} isn't active, so {request.verb} can't act on it")
    view = live.view
    if view.kind != "hosted":
        return _guest_dry_run(request, args, view)
    if led is None:
        return await _ask_lead(view, request, source)
    return dry_run(led.conductor, request, time.monotonic())


def _guest_dry_run(request: messages.DryRunRequest, args: verbs.AnyArgs, view: messages.RunView) -> messages.DryRun:
    """Return what is known of a command to a different program's loop before that carries it out."""
    said = messages.DryRun(rid=request.rid, run=view.run, verb=request.verb)
    why = view.why_not(request.verb)
    if not why and isinstance(args, verbs.Stop) and args.checkpoint and view.kind == "guest":
        why = (
            view.why_not("checkpoint")
            and f"no checkpoint can be written ({view.why_not('checkpoint')}); add checkpoint=false"
        )
    if why:
        return msgspec.structs.replace(said, refused=why, field="run")
    if isinstance(args, verbs.SetLr) and view.learning_rate is not None:
        made = LearningRateChanged(view.learning_rate, args.value, args.schedule)
        before, after = result(made)
        return msgspec.structs.replace(said, before=before, after=after, step=view.step + 1)
    return said


async def _agent_dry_run(
    request: messages.DryRunRequest, args: verbs.AgentArgs, source: QueryContext
) -> messages.DryRun:
    """Return what a command to an agent itself would do, as the agent knows that would carry it out."""
    node = request.node
    if verbs.VERBS[request.verb].to_node and node not in (None, source.node) and source.address_of(node) is not None:
        return await source.ask(node, request)
    command = messages.Command(rid=request.rid, id="", verb=request.verb, args=request.args, run=request.run, node=node)
    said = messages.DryRun(rid=request.rid, run=request.run or "", verb=request.verb)
    made: AnyEvent | None = None
    try:
        match args:
            case verbs.StartRun():
                source.lead.check_start(command)
            case verbs.Promote():
                made = source.lead.transfer.foresee(command)
            case verbs.Acknowledge() | verbs.Mute():
                made = source.alerts.foresee(command, args)
            case _ as missing:
                assert_never(missing)
    except InvalidInputError as error:
        return msgspec.structs.replace(said, refused=error.problem, field=error.where)
    before, after = result(made) if made is not None else (None, None)
    return msgspec.structs.replace(said, before=before, after=after)


async def _diagnosis(request: messages.DiagnosisRequest, source: QueryContext) -> messages.DiagnosisReply:
    """Diagnose a run as it is now, by the agent that leads it, and else by the record."""
    paths, last_step = run_paths(request.run, source), request.last_step
    live, led = source.live_run(paths.directory), source.led(paths.directory) if last_step is None else None
    if last_step is None and live is not None and live.view.kind == "hosted" and led is None:
        return await _ask_lead(live.view, request, source)
    facts = led.live_facts(source.alerts.view.alerts) if led is not None else None
    at = time.time() if led is not None else None

    def read(reader: RecordReader) -> messages.Diagnosis:
        return diagnose(facts_of_record(reader, config_of(paths), live=facts, at=at, last_step=last_step))

    diagnosis = await from_record(paths, read)
    return messages.DiagnosisReply(rid=request.rid, run=paths.directory.name, live=led is not None, diagnosis=diagnosis)


async def _log(request: messages.LogRequest, source: QueryContext) -> messages.LogPart:
    paths = run_paths(request.run, source)
    file, run = paths.log(request.rank), paths.directory.name

    def read() -> tuple[int, int, int, str]:
        with received_names.opened(paths.directory, file.parent.name, file.name) as stream:
            return log_format.read_part(stream, request.offset_bytes, request.limit_bytes)

    try:
        offset, end, size, text = await asyncio.to_thread(read)
    except FileNotFoundError:
        return await _log_elsewhere(msgspec.structs.replace(request, run=run), paths, source)
    return messages.LogPart(
        rid=request.rid, run=run, rank=request.rank, offset_bytes=offset, size_bytes=size, text=text, end_bytes=end
    )


async def _log_elsewhere(request: messages.LogRequest, paths: RunPaths, source: QueryContext) -> messages.LogPart:
    """Return a part of a log from the agent of the node that hosts the rank, or that knows which one does."""
    live = source.live_run(paths.directory)
    view = live.view if live is not None else await from_record(paths, kept_view)
    if view is None:
        raise UnknownRankError("rank", f"run {request.run} has no log for rank {request.rank}")
    node = next((rank.node for rank in view.ranks if rank.rank == request.rank), None)
    if view.kind == "guest":
        raise UnknownRankError(
            "rank", f"{request.rank} has no log: {view.run} is a different program's, which keeps its own output"
        )
    if node == source.node:
        raise UnknownRankError("rank", f"{request.rank} has no log on {node}: its file is gone")
    if node is None and source.address_of(view.lead) is None:  # a follower knows its own rank only
        known = ", ".join(str(rank) for rank in sorted(rank.rank for rank in view.ranks))
        raise UnknownRankError("rank", f"no rank {request.rank} in this run; the ranks are {known}")
    try:
        return await source.ask(node or view.lead, request)
    except TrainctlError as error:
        problem = f"{request.rank} is on {node}: {error}" if node else str(error).removeprefix("rank: ")
        raise UnknownRankError("rank", problem) from None
