"""Requests from a client to an agent."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.config.names import NAME_PATTERN
from trainctl.protocol.config.run_tables import DataKind
from trainctl.protocol.messages.base import MAX_COUNT, Count, Message, Name
from trainctl.protocol.messages.guests import MOST_GUEST_RANKS, GuestRank, GuestStep


class Request(Message, frozen=True, forbid_unknown_fields=True):
    """The base of all requests; the reply repeats `rid`."""

    rid: Annotated[str, Meta(min_length=1, max_length=64)]


class SnapshotRequest(Request, tag="snapshot-request", frozen=True, forbid_unknown_fields=True):
    """Requests the current state, and the history at a given resolution. This is the first half of attaching."""

    columns: Annotated[int, Meta(ge=0, le=2000)] = 120  # number of buckets wanted in each series
    run: str | None = None  # run ID; None: the active run (the hosted one if there are several), or else the newest


class HistoryRequest(Request, tag="history-request", frozen=True, forbid_unknown_fields=True):
    """Requests series of one run between two steps, from the record."""

    run: Name
    metrics: Annotated[tuple[Name, ...], Meta(max_length=16)]  # metric names
    first_step: Count = 0
    last_step: Count | None = None
    columns: Annotated[int, Meta(ge=1, le=2000)] = 120


class GapRequest(Request, tag="gap-request", frozen=True, forbid_unknown_fields=True):
    """Requests live messages that the client missed."""

    boot: Name
    first_seq: Count
    last_seq: Count


class RunsRequest(Request, tag="runs-request", frozen=True, forbid_unknown_fields=True):
    """Requests the runs that the agent knows."""


class EventsRequest(Request, tag="events-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of a run's events, oldest first."""

    run: str | None = None
    after_id: Count = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 200
    newest: bool = False  # whether to return the last `limit` events instead of the first


class StepsRequest(Request, tag="steps-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of committed steps, oldest first."""

    run: str | None = None
    after_step: Count = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 500


class HostsRequest(Request, tag="hosts-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of machine readings, oldest first. The lead has all nodes' readings, a follower only its own."""

    run: str | None = None
    after_row: Count = 0  # `last_row` of the previous page
    limit: Annotated[int, Meta(ge=1, le=200)] = 100


class SamplesRequest(Request, tag="samples-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of the model's answers, oldest first."""

    run: str | None = None
    after_row: Count = 0  # `last_row` of the previous page
    limit: Annotated[int, Meta(ge=1, le=100)] = 100
    newest: bool = False  # whether to return the last `limit` answers instead of the first


class LogRequest(Request, tag="log-request", frozen=True, forbid_unknown_fields=True):
    """Requests part of a trainer's log file."""

    run: str | None = None
    rank: Count = 0
    offset_bytes: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] = -65536  # first byte; negative: from the end
    limit_bytes: Annotated[int, Meta(ge=1, le=262144)] = 65536


class AttendRequest(Request, tag="attend-request", frozen=True, forbid_unknown_fields=True):
    """Reports an attached client, or only requests the list of clients. Sent every 5 s; expires after 20 s."""

    viewer: Annotated[str, Meta(max_length=64)] = ""  # client ID while it is attached; empty: only a query
    by: Annotated[str, Meta(max_length=64)] = ""  # name that the client gives itself
    read_only: bool = False
    leaving: bool = False


class FactsRequest(Request, tag="facts-request", frozen=True, forbid_unknown_fields=True):
    """Requests facts about a node's machine and installation, for `trainctl doctor`."""


class DigestsRequest(Request, tag="digests-request", frozen=True, forbid_unknown_fields=True):
    """Requests digests of a model folder or of data. The node reads every file, as fast as its disk allows."""

    what: Literal["model", "data"]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]  # absolute path
    kind: DataKind = "text"  # kind of data, which selects the files of a folder


class AuditRequest(Request, tag="audit-request", frozen=True, forbid_unknown_fields=True):
    """Requests the list of refusals, newest first. Only operators may send it."""

    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class Command(Request, tag="command", frozen=True, forbid_unknown_fields=True):
    """Requests a change. Sending the same `id` again gives the same outcome; `rid` only addresses the reply."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]  # command ID, a UUID
    verb: Name
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    by: Annotated[str, Meta(max_length=64)] = ""  # name that the client gives itself
    node: str | None = None
    run: str | None = None
    if_plan: Count | None = None  # required plan version; None: any
    issued_at: float = 0.0
    ttl_seconds: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # time limit, counted from receipt
    undoes: Annotated[str, Meta(min_length=1, max_length=64)] | None = None  # command ID or event number to undo


GuestId = Annotated[str, Meta(pattern=NAME_PATTERN)]


class AttachRun(Request, tag="attach-run", frozen=True, forbid_unknown_fields=True):
    """Attaches the run of a program that does its own training, so that the agent shows and records it alongside the
    hosted run. Sending it again updates the run."""

    run: GuestId  # run ID, chosen by the program; keep it to continue the run
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    started_at: float  # start time, in Unix seconds
    ranks: Annotated[tuple[GuestRank, ...], Meta(min_length=1, max_length=MOST_GUEST_RANKS)]
    kind: Literal["guest", "exec"] = "guest"
    steps: Count | None = None  # total number of steps; None: unknown
    weight_unit: Annotated[str, Meta(min_length=1, max_length=32)] = "tokens"
    loss_unit: Annotated[str, Meta(max_length=32)] = "nats per token"
    after_step: Count | None = None  # continue after this step and retract later steps from the record


class RunSteps(Request, tag="run-steps", frozen=True, forbid_unknown_fields=True):
    """Sends steps of an attached run, in order. Steps that are already recorded have no effect."""

    run: GuestId
    steps: Annotated[tuple[GuestStep, ...], Meta(max_length=500)] = ()  # empty: only shows that the program is alive


class EndRun(Request, tag="end-run", frozen=True, forbid_unknown_fields=True):
    """Ends an attached run."""

    run: GuestId
    state: Literal["finished", "stopped", "failed"] = "finished"
    reason: Annotated[str, Meta(max_length=1000)] = ""


GuestRequest = AttachRun | RunSteps | EndRun
ClientRequest = (
    SnapshotRequest | HistoryRequest | GapRequest | RunsRequest | EventsRequest | StepsRequest | HostsRequest
    | SamplesRequest | LogRequest | AttendRequest | FactsRequest | DigestsRequest | AuditRequest | AttachRun
    | RunSteps | EndRun | Command
)  # fmt: skip
