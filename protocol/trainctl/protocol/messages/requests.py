"""Requests of a client to an agent."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.config.names import NAME_PATTERN
from trainctl.protocol.config.run_file import DataKind
from trainctl.protocol.messages.base import MAX_COUNT, Count, Message, Name
from trainctl.protocol.messages.guests import MOST_GUEST_RANKS, GuestRank, GuestStep


class Request(Message, frozen=True, forbid_unknown_fields=True):
    """The root of what a client asks; `rid` comes back in the reply."""

    rid: Annotated[str, Meta(min_length=1, max_length=64)]


class SnapshotRequest(Request, tag="snapshot-request", frozen=True, forbid_unknown_fields=True):
    """Asks for the state, and the history at some resolution; the first half of an attach."""

    columns: Annotated[int, Meta(ge=0, le=2000)] = 120  # buckets wanted in each series
    run: str | None = None  # None: the active run (the hosted one if there are several), else the newest


class HistoryRequest(Request, tag="history-request", frozen=True, forbid_unknown_fields=True):
    """Asks for series of one run between two steps, from the record."""

    run: Name
    metrics: Annotated[tuple[Name, ...], Meta(max_length=16)]  # names of metrics
    first_step: Count = 0
    last_step: Count | None = None
    columns: Annotated[int, Meta(ge=1, le=2000)] = 120


class GapRequest(Request, tag="gap-request", frozen=True, forbid_unknown_fields=True):
    """Asks for live messages that were missed."""

    boot: Name
    first_seq: Count
    last_seq: Count


class RunsRequest(Request, tag="runs-request", frozen=True, forbid_unknown_fields=True):
    """Asks for the runs that the agent knows."""


class EventsRequest(Request, tag="events-request", frozen=True, forbid_unknown_fields=True):
    """Asks for a page of a run's events, oldest first."""

    run: str | None = None
    after_id: Count = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 200
    newest: bool = False  # the last `limit` events instead of the first


class StepsRequest(Request, tag="steps-request", frozen=True, forbid_unknown_fields=True):
    """Asks for a page of committed steps, oldest first."""

    run: str | None = None
    after_step: Count = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 500


class HostsRequest(Request, tag="hosts-request", frozen=True, forbid_unknown_fields=True):
    """Asks for a page of readings of machines, oldest first: all of the run's from its lead, else the node's own."""

    run: str | None = None
    after_row: Count = 0  # `last_row` of the page before
    limit: Annotated[int, Meta(ge=1, le=200)] = 100


class LogRequest(Request, tag="log-request", frozen=True, forbid_unknown_fields=True):
    """Asks for part of a trainer's log file."""

    run: str | None = None
    rank: Count = 0
    offset_bytes: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] = -65536  # where to begin; negative: from the end
    limit_bytes: Annotated[int, Meta(ge=1, le=262144)] = 65536


class AttendRequest(Request, tag="attend-request", frozen=True, forbid_unknown_fields=True):
    """Says that a client is attached, or only asks who is. Sent every 5 s; forgotten after 20 s."""

    viewer: Annotated[str, Meta(max_length=64)] = ""  # the client's own id while it is attached; empty: it only asks
    by: Annotated[str, Meta(max_length=64)] = ""  # who it is, as the client says
    read_only: bool = False
    leaving: bool = False


class FactsRequest(Request, tag="facts-request", frozen=True, forbid_unknown_fields=True):
    """Asks for facts of a node's machine and installation, for `trainctl doctor`."""


class DigestsRequest(Request, tag="digests-request", frozen=True, forbid_unknown_fields=True):
    """Asks for digests of a model's folder or of data. The node reads all of it, as fast as its disk allows."""

    what: Literal["model", "data"]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]  # absolute
    kind: DataKind = "text"  # of data: which files of a folder are read


class AuditRequest(Request, tag="audit-request", frozen=True, forbid_unknown_fields=True):
    """Asks for the refusals, newest first; for operators."""

    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class Command(Request, tag="command", frozen=True, forbid_unknown_fields=True):
    """Asks for a change. The same id again gives the same outcome; `rid` only addresses the reply."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]  # UUID
    verb: Name
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    by: Annotated[str, Meta(max_length=64)] = ""  # who it is, as the client says
    node: str | None = None
    run: str | None = None
    if_plan: Count | None = None  # refused if this is no longer the plan version; None: any
    issued_at: float = 0.0
    ttl_seconds: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # counted from receipt
    undoes: Annotated[str, Meta(min_length=1, max_length=64)] | None = None  # the command, or event's number, it undoes


GuestId = Annotated[str, Meta(pattern=NAME_PATTERN)]


class AttachRun(Request, tag="attach-run", frozen=True, forbid_unknown_fields=True):
    """Has the run of a program that trains by itself shown and recorded, beside the hosted run. Sent again, it updates
    the run."""

    run: GuestId  # an id that the program chooses and keeps: the run continues under it
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    started_at: float  # Unix seconds
    ranks: Annotated[tuple[GuestRank, ...], Meta(min_length=1, max_length=MOST_GUEST_RANKS)]
    kind: Literal["guest", "exec"] = "guest"
    steps: Count | None = None  # steps in all
    weight_unit: Annotated[str, Meta(min_length=1, max_length=32)] = "tokens"  # what the loss is divided by
    loss_unit: Annotated[str, Meta(max_length=32)] = "nats per token"
    after_step: Count | None = None  # continue after this step: later ones in the record are retracted


class RunSteps(Request, tag="run-steps", frozen=True, forbid_unknown_fields=True):
    """Steps of an attached run, in order. Steps that are already recorded change nothing."""

    run: GuestId
    steps: Annotated[tuple[GuestStep, ...], Meta(max_length=500)] = ()  # empty: the program only shows that it is alive


class EndRun(Request, tag="end-run", frozen=True, forbid_unknown_fields=True):
    """Ends an attached run."""

    run: GuestId
    state: Literal["finished", "stopped", "failed"] = "finished"
    reason: Annotated[str, Meta(max_length=1000)] = ""


GuestRequest = AttachRun | RunSteps | EndRun
ClientRequest = (
    SnapshotRequest | HistoryRequest | GapRequest | RunsRequest | EventsRequest | StepsRequest | HostsRequest
    | LogRequest | AttendRequest | FactsRequest | DigestsRequest | AuditRequest | AttachRun | RunSteps | EndRun
    | Command
)  # fmt: skip
