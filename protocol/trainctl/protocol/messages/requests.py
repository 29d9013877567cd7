"""Requests from a client to an agent."""

from collections.abc import Callable
from typing import Annotated, Any, Concatenate, Generic, Literal, ParamSpec, Protocol, TypeVar, get_args

import msgspec
from msgspec import Meta

from trainctl.protocol.config.names import FILE_PATTERN, NAME_PATTERN
from trainctl.protocol.config.run_tables import MAX_ANSWER_TOKENS, DataKind
from trainctl.protocol.messages.base import MAX_COUNT, Count, Message, Name, WorkId, WorkKind
from trainctl.protocol.messages.peers import MAX_GUEST_RANKS, GuestRank, GuestStep
from trainctl.protocol.messages.replies import (
    Audit,
    Calibration,
    Calibrations,
    CommandReply,
    DiagnosisReply,
    Digests,
    Disk,
    DryRun,
    Events,
    Facts,
    GapFill,
    History,
    HookTest,
    Hosts,
    LinkReply,
    LogPart,
    Pairs,
    Policies,
    RecordPart,
    Reply,
    RunEdited,
    RunKept,
    Runs,
    Samples,
    SliceReply,
    Snapshot,
    StepProfiles,
    Steps,
    TracePart,
    Viewers,
    WorkFilePart,
    WorkHosted,
    Works,
    WorkStatus,
)
from trainctl.protocol.messages.trainer import TraceName

P = ParamSpec("P")
R = TypeVar("R", bound=Reply)


class Request(Message, Generic[R], frozen=True, forbid_unknown_fields=True):
    """The base of all requests, with the type of the reply, which repeats `rid`."""

    rid: Annotated[str, Meta(min_length=1, max_length=64)]


def reply_type(request: type[Request[R]]) -> type[R]:
    """Return the type of the reply to a kind of request."""
    reply: type[R] = get_args(request.__orig_bases__[0])[0]  # type: ignore[attr-defined]
    return reply


class Asker(Protocol):
    """An agent's client, or a record in an agent's place, to those who ask it; errors are those of `Client.ask`."""

    async def ask(
        self, request: Callable[Concatenate[str, P], Request[R]], /, *args: P.args, **fields: P.kwargs
    ) -> R: ...


class SnapshotRequest(Request[Snapshot], tag="snapshot-request", frozen=True, forbid_unknown_fields=True):
    """Requests the current state, and the history at a given resolution. This is the first half of attaching."""

    columns: Annotated[int, Meta(ge=0, le=2000)] = 120  # number of buckets wanted in each series
    run: str | None = None  # run ID; None: the active run (the hosted one if there are several), or else the newest


class HistoryRequest(Request[History], tag="history-request", frozen=True, forbid_unknown_fields=True):
    """Requests series of one run between two steps, from the record."""

    run: Name
    metrics: Annotated[tuple[Name, ...], Meta(max_length=16)]  # metric names
    first_step: Count = 0
    last_step: Count | None = None
    columns: Annotated[int, Meta(ge=1, le=2000)] = 120


class GapRequest(Request[GapFill], tag="gap-request", frozen=True, forbid_unknown_fields=True):
    """Requests live messages that the client missed."""

    boot: Name
    first_seq: Count
    last_seq: Count


class RunsRequest(Request[Runs], tag="runs-request", frozen=True, forbid_unknown_fields=True):
    """Requests the runs that the agent knows."""


class EventsRequest(Request[Events], tag="events-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of a run's events, oldest first."""

    run: str | None = None
    after_id: Count = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 200
    newest: bool = False  # whether to return the last `limit` events instead of the first


class StepsRequest(Request[Steps], tag="steps-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of committed steps, oldest first."""

    run: str | None = None
    after_step: Count = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 500


class HostsRequest(Request[Hosts], tag="hosts-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of machine readings, oldest first. The lead has all nodes' readings, a follower only its own."""

    run: str | None = None
    after_row: Count = 0  # `last_row` of the previous page
    limit: Annotated[int, Meta(ge=1, le=200)] = 100


class SamplesRequest(Request[Samples], tag="samples-request", frozen=True, forbid_unknown_fields=True):
    """Requests a page of the model's answers, oldest first."""

    run: str | None = None
    after_row: Count = 0  # `last_row` of the previous page
    limit: Annotated[int, Meta(ge=1, le=100)] = 100
    newest: bool = False  # whether to return the last `limit` answers instead of the first


class StepProfilesRequest(Request[StepProfiles], tag="traces-request", frozen=True, forbid_unknown_fields=True):
    """Requests the newest profiles of a run's steps, from its record."""

    run: str | None = None
    limit: Annotated[int, Meta(ge=1, le=100)] = 64  # number of events, one for each rank's profile


class TraceRequest(Request[TracePart], tag="trace-request", frozen=True, forbid_unknown_fields=True):
    """Requests part of the file of a profile's trace, from any agent of the run."""

    run: Name
    node: Name  # node that has the file
    file: TraceName
    offset_bytes: Count = 0


class RecordRequest(Request[RecordPart], tag="record-request", frozen=True, forbid_unknown_fields=True):
    """Requests part of a copy of a run's record, as the agent's node has it. Without `digest` the agent makes a copy of
    the record as it is now, which stays for a minute after the last request for it."""

    run: Name | None  # ID; null: the active run, or else the newest
    digest: Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?\Z")] = ""  # of the copy; empty: a new one
    offset_bytes: Count = 0  # offset in the copy of the first byte wanted


class PairsRequest(Request[Pairs], tag="pairs-request", frozen=True, forbid_unknown_fields=True):
    """Requests the held-out pairs of a run's newest evaluations."""

    run: str | None = None
    limit: Annotated[int, Meta(ge=1, le=20)] = 20  # number of evaluations


class PoliciesRequest(Request[Policies], tag="policies-request", frozen=True, forbid_unknown_fields=True):
    """Requests what the policies of an active run see, what they would do next, and their last actions."""

    run: str | None = None


class DryRunRequest(Request[DryRun], tag="dry-run-request", frozen=True, forbid_unknown_fields=True):
    """Requests what a command would do to an active run, or why it would be refused. It isn't sent. Of `promote` its
    node says what it knows, without asking others for their consent; of `start-run` whether the agent is free."""

    verb: Name
    run: str | None = None
    args: dict[str, Any] = msgspec.field(default_factory=dict)
    node: str | None = None
    if_plan: Count | None = None  # required plan version; None: any


class DiagnosisRequest(Request[DiagnosisReply], tag="diagnosis-request", frozen=True, forbid_unknown_fields=True):
    """Requests why a run is slow or stuck: of an active run by its agent, of another by its record."""

    run: str | None = None
    last_step: Count | None = None  # judge the run as it was at this step; null: as it is now


class LogRequest(Request[LogPart], tag="log-request", frozen=True, forbid_unknown_fields=True):
    """Requests part of a trainer's log file."""

    run: str | None = None
    rank: Count = 0
    offset_bytes: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] = -65536  # first byte; negative: from the end
    limit_bytes: Annotated[int, Meta(ge=1, le=262144)] = 65536


ATTEND_SECONDS = 5.0
"""Seconds between two messages of a viewer that it is there."""


class AttendRequest(Request[Viewers], tag="attend-request", frozen=True, forbid_unknown_fields=True):
    """Reports an attached client, or only requests the list of clients. Sent every 5 s; expires after 20 s."""

    viewer: Annotated[str, Meta(max_length=64)] = ""  # client ID while it is attached; empty: only a query
    by: Annotated[str, Meta(max_length=64)] = ""  # name that the client gives itself
    read_only: bool = False
    leaving: bool = False


class FactsRequest(Request[Facts], tag="facts-request", frozen=True, forbid_unknown_fields=True):
    """Requests facts about a node's machine and installation, for `trainctl doctor`."""


class DigestsRequest(Request[Digests], tag="digests-request", frozen=True, forbid_unknown_fields=True):
    """Requests digests of a model folder or of data that a run file on the node names. The node reads every file, as
    fast as its disk allows."""

    what: Literal["model", "data"]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]  # as in the run file: a path or a Hugging Face id
    kind: DataKind = "text"  # kind of data, which selects the files of a folder


class DiskRequest(Request[Disk], tag="disk-request", frozen=True, forbid_unknown_fields=True):
    """Requests the speed of the disk that holds token caches, measured with a temporary file of up to 32 MiB."""

    folder: Annotated[str, Meta(max_length=4096)] = ""  # `cache_path` of a run file there; empty: the agent's


class CalibrateRequest(Request[Calibration], tag="calibrate-request", frozen=True, forbid_unknown_fields=True):
    """Requests a calibration of the agent's node for a run file. It takes about a minute, and no run may be in progress
    there. Sending it again returns the progress, and at last the profile. Beside others of the machine it waits before
    each stage until a request allows it: 1: passes, 2: idle once it has no more of them, 3: the other parts, alone."""

    calibration: WorkId  # ID of the calibration, chosen by the client
    config: dict[str, Any]  # parsed run file; empty: the one of the node's newest run
    lead: Name | None = None  # node to which the link is measured too; null: none
    beside: Annotated[tuple[Name, ...], Meta(max_length=63)] = ()  # nodes of the machine calibrated at the same time
    stage: Annotated[int, Meta(ge=0, le=3)] = 0  # with beside: last stage that may begin
    cancel: bool = False  # ends the calibration


class LinkRequest(Request[LinkReply], tag="link-request", frozen=True, forbid_unknown_fields=True):
    """A node's agent asks another one to measure the link between them over one TCP connection, both directions at
    once. Sending it again waits for the end of the measurement and returns the result. Refused during a run."""

    node: Name  # node that asks
    token: Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]  # first bytes of the connection


class CalibrationsRequest(Request[Calibrations], tag="profiles-request", frozen=True, forbid_unknown_fields=True):
    """Requests the stored profiles of the agent's node, newest first."""

    limit: Annotated[int, Meta(ge=1, le=32)] = 16


class AuditRequest(Request[Audit], tag="audit-request", frozen=True, forbid_unknown_fields=True):
    """Requests the list of refusals, newest first. Only operators may send it."""

    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class HookTestRequest(Request[HookTest], tag="hook-test-request", frozen=True, forbid_unknown_fields=True):
    """Requests that the agent call each of its alert hooks once, now. Only operators may send it."""


class EditRun(Request[RunEdited], tag="edit-run", frozen=True, forbid_unknown_fields=True):
    """Renames a run on the agent's node, or removes one that has ended there, with its checkpoints and logs. Only
    operators may send it."""

    run: Name
    name: Annotated[str, Meta(pattern=NAME_PATTERN)] | None = None  # its new name; None: remove it


class Command(Request[CommandReply], tag="command", frozen=True, forbid_unknown_fields=True):
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


class AttachRun(Request[RunKept], tag="attach-run", frozen=True, forbid_unknown_fields=True):
    """Attaches the run of a program that does its own training, so that the agent shows and records it alongside the
    hosted run. Sending it again updates the run."""

    run: GuestId  # run ID, chosen by the program; keep it to continue the run
    name: Annotated[str, Meta(min_length=1, max_length=64)]
    started_at: float  # start time, in Unix seconds
    ranks: Annotated[tuple[GuestRank, ...], Meta(min_length=1, max_length=MAX_GUEST_RANKS)]
    kind: Literal["guest", "exec"] = "guest"
    steps: Count | None = None  # total number of steps; None: unknown
    weight_unit: Annotated[str, Meta(min_length=1, max_length=32)] = "tokens"
    loss_unit: Annotated[str, Meta(max_length=32)] = ""  # unit of the loss, for example nats per token; empty: none
    after_step: Count | None = None  # continue after this step and retract later steps from the record


class RunSteps(Request[RunKept], tag="run-steps", frozen=True, forbid_unknown_fields=True):
    """Sends steps of an attached run, in order. Steps that are already recorded have no effect."""

    run: GuestId
    steps: Annotated[tuple[GuestStep, ...], Meta(max_length=500)] = ()  # empty: only shows that the program is alive


class EndRun(Request[RunKept], tag="end-run", frozen=True, forbid_unknown_fields=True):
    """Ends an attached run."""

    run: GuestId
    state: Literal["finished", "stopped", "failed"] = "finished"
    reason: Annotated[str, Meta(max_length=1000)] = ""


ROWS_BYTES = 48 * 1024
"""Largest part of the rows of separate work in one request, in bytes."""
SLICE_ROWS: dict[WorkKind, int] = {"log-probabilities": 250, "answers": 6}
"""Most rows in a slice, so that their results fit into one request."""
ANSWER_BYTES = 8 * 1024
"""Most bytes of an answer, encoded as JSON; a longer one is cut."""
Sha256 = Annotated[str, Meta(max_length=64)]
FileName = Annotated[str, Meta(pattern=FILE_PATTERN)]
"""Name of a file of a checkpoint."""


class AnswerOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The choice of an answer's tokens."""

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_ANSWER_TOKENS)] = 128  # most tokens per answer
    temperature: Annotated[float, Meta(ge=0, le=10)] = 0.0  # 0: always the likeliest token
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0  # tokens are drawn from the likeliest ones of this probability
    seed: Annotated[int, Meta(ge=0, le=2**40)] = 0  # seed; each row has its own, derived from this one
    use_generation_config: bool = False  # torch only: apply the other settings of generation_config.json


class WorksRequest(Request[Works], tag="works-request", frozen=True, forbid_unknown_fields=True):
    """Requests the separate work that the agent's node leads or takes part in."""

    led: bool = False  # only the work that the node leads


class OpenWork(Request[WorkStatus], tag="open-work", frozen=True, forbid_unknown_fields=True):
    """Opens separate work: rows that the nodes process, slice by slice, with a checkpoint of a run. The work starts
    when all rows have arrived. Sending it again returns the state of the work."""

    work: WorkId  # work ID, chosen by the client
    kind: WorkKind
    run: Name
    rows: Annotated[int, Meta(ge=1, le=MAX_COUNT)]  # number of rows
    size_bytes: Count  # size of all rows, including a line feed after each
    digest: Sha256  # SHA-256 digest of the same bytes
    step: Count | None = None  # step of the checkpoint; None: the newest
    best: bool = False  # use the checkpoint with the lowest held-out loss
    nodes: Annotated[tuple[Name, ...], Meta(max_length=64)] = ()  # nodes that take part; empty: all nodes of the run
    options: AnswerOptions = AnswerOptions()
    file: Annotated[str, Meta(max_length=255)] = ""  # name of the file with the rows, as people are shown it


class WorkRows(Request[WorkStatus], tag="work-rows", frozen=True, forbid_unknown_fields=True):
    """Sends part of the rows of separate work, as JSON lines."""

    work: WorkId
    offset_bytes: Count  # place of `data` in the rows; parts that don't follow the received ones are ignored
    data: Annotated[bytes, Meta(max_length=ROWS_BYTES)]


class WorkResultsRequest(Request[WorkStatus], tag="work-results-request", frozen=True, forbid_unknown_fields=True):
    """Requests the state of separate work and results in row order, as far as they are there."""

    work: WorkId
    after_row: Count = 0  # number of results that the client already has
    limit: Annotated[int, Meta(ge=0, le=2000)] = 1000


class EndWork(Request[WorkStatus], tag="end-work", frozen=True, forbid_unknown_fields=True):
    """Cancels separate work, if it is still in progress, and deletes it with its results."""

    work: WorkId


class HostWork(Request[WorkHosted], tag="host-work", frozen=True, forbid_unknown_fields=True):
    """The lead's agent asks a node to start a worker for separate work. If the worker is there, this has no effect."""

    work: WorkId
    kind: WorkKind
    run: Name
    lead: Name  # node that has the rows and the checkpoint
    config: dict[str, Any]  # parsed run file
    checkpoint: Count  # step of the checkpoint
    files: dict[FileName, Sha256]  # files of the checkpoint that the worker needs, with their digests
    options: AnswerOptions = AnswerOptions()


class WorkFileRequest(Request[WorkFilePart], tag="work-file-request", frozen=True, forbid_unknown_fields=True):
    """A node requests part of a file of the checkpoint from the lead's agent."""

    work: WorkId
    name: FileName  # name of the file
    offset_bytes: Count


class SliceRequest(Request[SliceReply], tag="slice-request", frozen=True, forbid_unknown_fields=True):
    """A node returns results, and requests a slice for its worker. It repeats this every second."""

    work: WorkId
    node: Name
    state: Literal["loading", "busy", "idle", "gone"]  # idle: the worker waits for a slice; gone: it has ended
    device: str = ""
    answered: Count | None = None  # ID of the slice that `results` belong to; None: no results
    results: tuple[bytes, ...] = ()  # one JSON object per row of that slice, in order
    problem: str = ""  # gone: reason


WorkRequest = (
    WorksRequest | OpenWork | WorkRows | WorkResultsRequest | EndWork | HostWork | WorkFileRequest | SliceRequest
)
GuestRequest = AttachRun | RunSteps | EndRun
CalibrationRequest = CalibrateRequest | CalibrationsRequest | LinkRequest
Query = (
    SnapshotRequest
    | HistoryRequest
    | GapRequest
    | RunsRequest
    | EventsRequest
    | StepsRequest
    | HostsRequest
    | SamplesRequest
    | PairsRequest
    | PoliciesRequest
    | DryRunRequest
    | DiagnosisRequest
    | LogRequest
    | AttendRequest
    | FactsRequest
    | StepProfilesRequest
    | TraceRequest
    | RecordRequest
    | DigestsRequest
    | DiskRequest
    | AuditRequest
    | HookTestRequest
    | EditRun
)
"""Requests that change no run that is active."""
Question = Query | CalibrationRequest | GuestRequest | WorkRequest
"""All requests but commands, which have an order."""
ClientRequest = Question | Command
