"""Queries that another node's agent may answer: traces, logs, policies, dry runs and diagnosis."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from trainctl.node_agent.clients.query_context import (
    QueryContext,
    UnknownRankError,
    from_record,
    kept_view,
    run_paths,
)
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import config_of, facts_of_record
from trainctl.protocol.client.client import Client
from trainctl.protocol.config.policies import AUTHOR
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import (
    TRACE_PART_BYTES,
    Diagnosis,
    DiagnosisReply,
    DiagnosisRequest,
    DryRun,
    DryRunRequest,
    LogPart,
    LogRequest,
    Policies,
    PoliciesRequest,
    PolicyStatus,
    RunView,
    TracePart,
    TraceRequest,
)
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.security import received_names

R = TypeVar("R", bound=msgspec.Struct)
ELSEWHERE_SECONDS = 3.0
"""Seconds another node's agent may take to answer a forwarded request; a client waits longer."""


async def trace(request: TraceRequest, source: QueryContext) -> TracePart:
    """From this node's disk, or from the agent of the node that has it."""
    if request.node != source.node:
        return await _trace_elsewhere(request, source)
    return await asyncio.to_thread(_read_trace, request, run_paths(request.run, source).directory)


def _read_trace(request: TraceRequest, directory: Path) -> TracePart:
    try:
        with received_names.opened(directory, "profiles", request.file) as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(min(request.offset_bytes, size))
            data = file.read(TRACE_PART_BYTES)
    except FileNotFoundError:
        problem = f"{request.node} no longer has {request.file}: only the newest traces are kept; profile again"
        raise InvalidInputError("file", problem) from None
    except OSError as error:
        problem = f"{request.node} can't read {request.file}: {error.strerror or error}"
        raise InvalidInputError("file", problem) from None
    return TracePart(rid=request.rid, offset_bytes=request.offset_bytes, size_bytes=size, data=data)


async def _trace_elsewhere(request: TraceRequest, source: QueryContext) -> TracePart:
    def read(client: Client) -> Awaitable[TracePart]:
        return client.ask(TraceRequest, request.run, request.node, request.file, request.offset_bytes)

    def refused(error: TrainctlError) -> InvalidInputError:
        return InvalidInputError("node", f"{request.node}: {error}")

    address = source.address_of(request.node)
    if address is None:
        raise InvalidInputError("node", f"{request.node} is unreachable: its traces cannot be read")
    return await _ask(address, request.rid, source, read, refused)


async def policies(request: PoliciesRequest, source: QueryContext) -> Policies:
    """From the agent that leads the run. The newest commands come from the record."""
    paths = run_paths(request.run, source)
    live, run = source.live_run(paths.directory), paths.directory.name
    if live is None:
        raise InvalidInputError("run", f"{run} isn't active: its policies see nothing until it is resumed")
    statuses = source.policy_statuses(paths.directory)
    if statuses is None:
        return await _policies_elsewhere(request, live.view, source)

    def read(reader: RecordReader) -> tuple[PolicyStatus, ...]:
        return tuple(msgspec.structs.replace(one, actions=reader.commands_by(AUTHOR + one.name)) for one in statuses)

    return Policies(rid=request.rid, run=run, step=live.view.step, policies=await from_record(paths, read))


async def dry_run(request: DryRunRequest, source: QueryContext) -> DryRun:
    """Return what a command would do, from the agent that leads the run. Raises InvalidInputError."""
    paths = run_paths(request.run, source)
    live, run = source.live_run(paths.directory), paths.directory.name
    if live is None:
        raise InvalidInputError("run", f"{run} isn't active")
    if live.view.kind != "hosted":
        raise InvalidInputError("run", f"{run} does not support {request.verb}: {live.view.why_not(request.verb)}")
    answer = source.dry_run(paths.directory, request)
    if answer is not None:
        return answer
    asked = (request.verb, run, request.args, request.node, request.if_plan)
    return await _ask_lead(live.view, request.rid, source, lambda client: client.ask(DryRunRequest, *asked))


async def _policies_elsewhere(request: PoliciesRequest, view: RunView, source: QueryContext) -> Policies:
    if view.kind != "hosted":
        raise InvalidInputError("run", f"{view.run} is trained by another program: it has no policies")
    return await _ask_lead(view, request.rid, source, lambda client: client.ask(PoliciesRequest, view.run))


async def _ask_lead(view: RunView, rid: str, source: QueryContext, question: Callable[[Client], Awaitable[R]]) -> R:
    """The reply of the agent that leads a run. Raises InvalidInputError if there is none."""

    def refused(error: TrainctlError) -> InvalidInputError:
        return InvalidInputError("run", f"{view.lead} leads {view.run}: {error}")

    address = source.address_of(view.lead)
    if address is None:
        raise InvalidInputError("run", f"{view.lead}, which leads {view.run}, is unreachable: try again later")
    return await _ask(address, rid, source, question, refused)


async def _ask(
    address: str,
    rid: str,
    source: QueryContext,
    question: Callable[[Client], Awaitable[R]],
    refused: Callable[[TrainctlError], InvalidInputError],
) -> R:
    """The reply of the agent at `address`, as one to request `rid`. Raises what `refused` makes of an error."""
    try:
        async with Client(address, timeout_seconds=ELSEWHERE_SECONDS, keys=source.keys) as client:
            reply = await question(client)
    except TrainctlError as error:
        raise refused(error) from None
    return msgspec.structs.replace(reply, rid=rid)


async def diagnosis(request: DiagnosisRequest, source: QueryContext) -> DiagnosisReply:
    """Diagnose a run as it is now, by the agent that leads it, and else by the record."""
    paths = run_paths(request.run, source)
    run, live = paths.directory.name, source.live_run(paths.directory)
    facts = source.live_facts(paths.directory) if request.last_step is None else None
    is_led_elsewhere = live is not None and live.view.kind == "hosted" and facts is None
    if live is not None and is_led_elsewhere and request.last_step is None:
        return await _ask_lead(live.view, request.rid, source, lambda client: client.ask(DiagnosisRequest, run))
    at = time.time() if facts is not None else None

    def read(reader: RecordReader) -> Diagnosis:
        known = facts_of_record(reader, config_of(paths), live=facts, at=at, last_step=request.last_step)
        return diagnose(known)

    diagnosis = await from_record(paths, read)
    return DiagnosisReply(rid=request.rid, run=run, live=facts is not None, diagnosis=diagnosis)


async def log(request: LogRequest, source: QueryContext) -> LogPart:
    paths = run_paths(request.run, source)
    file, run = paths.log(request.rank), paths.directory.name

    def read() -> tuple[int, int, int, str]:
        with received_names.opened(paths.directory, file.parent.name, file.name) as stream:
            return log_format.read_part(stream, request.offset_bytes, request.limit_bytes)

    try:
        offset, end, size, text = await asyncio.to_thread(read)
    except FileNotFoundError:
        return await _log_elsewhere(msgspec.structs.replace(request, run=run), paths, source)
    return LogPart(
        rid=request.rid, run=run, rank=request.rank, offset_bytes=offset, size_bytes=size, text=text, end_bytes=end
    )


async def _log_elsewhere(request: LogRequest, paths: RunPaths, source: QueryContext) -> LogPart:
    """From the agent of the node that hosts the rank, or that knows which one does."""

    def read(client: Client) -> Awaitable[LogPart]:
        return client.ask(LogRequest, request.run, request.rank, request.offset_bytes, request.limit_bytes)

    def refused(error: TrainctlError) -> InvalidInputError:
        problem = f"{request.rank} is on {node}: {error}" if node else str(error).removeprefix("rank: ")
        return UnknownRankError("rank", problem)

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
    return await _ask(address, request.rid, source, read, refused)


def _kept_view(paths: RunPaths) -> RunView | None:
    with RecordReader(paths) as reader:
        return kept_view(reader)
