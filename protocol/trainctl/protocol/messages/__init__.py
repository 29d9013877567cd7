"""The closed union of everything that crosses a socket, with the unit or meaning of each field beside it.

Three conversations share it: a client and an agent (requests, replies, live messages), an agent and a trainer (orders
down, answers up), and the lead's agent and a follower's (the same, relayed). Times named `*_at` are Unix seconds; every
other duration is in seconds by a monotonic clock.
"""

import typing
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.config.alert_rules import AlertKind, AlertSeverity
from trainctl.protocol.messages.version import PROTOCOL_VERSION

MAX_COUNT = 2**63 - 1
"""Largest integer that the record can hold."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
RunState = Literal["starting", "running", "pausing", "paused", "stopping", "stopped", "finished", "failed"]
RankState = Literal[
    "starting", "ready", "run", "paused", "late", "hung", "lost", "rejoining", "draining", "drained", "failed", "done"
]
CommandState = Literal["accepted", "applied", "rejected", "expired", "failed", "conflict"]
Severity = Literal["info", "good", "warning", "error"]
PlanKind = Literal["train", "evaluate", "checkpoint", "sync", "measure", "probe"]
Engine = Literal["gloo", "ring"]

ACTIVE_RUN_STATES: frozenset[str] = frozenset({"starting", "running", "pausing", "paused", "stopping"})
FINAL_COMMAND_STATES: frozenset[str] = frozenset({"applied", "rejected", "expired", "failed", "conflict"})


class Generation(msgspec.Struct, array_like=True, frozen=True, order=True, kw_only=False):
    """One formation of the group. Compares as (term, n); everything between ranks and agents carries it."""

    term: Count  # grows by promotion or handover only
    n: Count  # grows at every fence, failed formation and resume

    def next(self) -> "Generation":
        return Generation(self.term, self.n + 1)

    def __str__(self) -> str:
        return f"g{self.term}.{self.n}"


class Range(msgspec.Struct, array_like=True, frozen=True, order=True):
    """Positions start, start + 1, ..., start + count - 1."""

    start: Count
    count: Annotated[int, Meta(ge=1)]

    @property
    def stop(self) -> int:
        return self.start + self.count


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower):
    """The root of every message; `v` is the sender's protocol version."""

    v: int = PROTOCOL_VERSION


# ---------------------------------------------------------------- agent -> trainer


class RankWork(msgspec.Struct, frozen=True):
    """What one rank does in a plan."""

    rank: Count
    ranges: tuple[Range, ...]  # positions (train, measure) or indices of held-out samples (evaluate)
    micro_batch: Annotated[int, Meta(ge=1)]  # samples per forward/backward


class StepPlan(Message, tag="step-plan", frozen=True):
    """One message for all ranks; its identity is (generation, seq).

    `train` moves the cursor; `evaluate` and `checkpoint` don't; `sync` gives all ranks the lowest one's state;
    `measure` times micro-batches and adds nothing; `probe` shows whether all ranks hold the same model.
    """

    run: Name
    generation: Generation
    seq: Count  # place in the run's journal of plans
    kind: PlanKind
    step: Count  # train: the step it commits, from 1; otherwise the last committed step
    plan_version: Count  # grows with each edit of shares, micro-batches, G, learning-rate rule or ranks
    cursor: Count  # first position of the step's global batch
    global_batch: Annotated[int, Meta(ge=1)]  # G, samples
    work: tuple[RankWork, ...]
    learning_rate: float
    divisor: Annotated[float, Meta(gt=0)]  # D: the constant each loss sum is divided by before backward
    finishes: Generation | None = None  # the generation whose half-done batch this completes
    writers: tuple[int, ...] = ()  # checkpoint: the ranks that write
    commands: tuple[str, ...] = ()  # ids of the commands that take effect with it


class Offer(Message, tag="offer", frozen=True):
    """Open endpoints for a generation that is about to be formed and answer Offered."""

    run: Name
    generation: Generation
    engine: Engine


class Form(Message, tag="form", frozen=True):
    """Join a generation: forget any older one, be levelled if behind, and answer Formed (or GroupFailed).

    A rank that isn't in `ranks` leaves the group and waits. All lists run parallel to `ranks`.
    """

    run: Name
    generation: Generation
    engine: Literal["none", "gloo", "ring"]
    ranks: tuple[int, ...]  # live ranks, ascending; a rank's index here is its place in the engine
    endpoints: tuple[tuple[str, ...], ...] = ()  # host:port of each rank's offer; none for engine "none"
    layout_digest: str = ""  # what every rank's parameters must be laid out as
    step: Count = 0  # last committed step of the generation's start
    cursor: Count = 0  # first position after it
    source: Count | None = None  # the rank whose state those behind are given; None: nobody is behind
    behind: tuple[int, ...] = ()  # ranks that are given it
    deadline_seconds: float = 30.0  # for joining and levelling; then the reducer is ended and the answer GroupFailed


class Fence(Message, tag="fence", frozen=True):
    """Leave the generation before this one at once and answer Fenced."""

    run: Name
    generation: Generation


class Leave(Message, tag="leave", frozen=True):
    """End the trainer process with exit status 0."""

    run: Name
    reason: str


ToTrainer = StepPlan | Offer | Form | Fence | Leave

# ---------------------------------------------------------------- trainer -> agent


class Phases(msgspec.Struct, frozen=True):
    """Where one rank's step went, in seconds."""

    data: float = 0.0  # reading and collating samples
    forward: float = 0.0
    backward: float = 0.0
    sync: float = 0.0  # all-reduce, the wait for slower ranks included
    optimizer: float = 0.0  # scale, clip and update
    wait: float = 0.0  # for the next plan

    @property
    def busy(self) -> float:
        """What the rank itself needs for its share: data, forward and backward."""
        return self.data + self.forward + self.backward


class FileDigest(msgspec.Struct, array_like=True, frozen=True):
    """One file of a model or of data."""

    name: str
    digest: str  # SHA-256 of name, size and content


class Ready(Message, tag="ready", frozen=True):
    """The trainer has loaded its model and data and can join a generation."""

    run: Name
    rank: Count
    pid: Count
    backend: Literal["torch", "mlx"]
    device: str  # "cpu", "cuda:0 NVIDIA H200", "gpu Apple M2 Ultra"
    parameters: Count  # trainable scalars
    samples: Count  # N: samples of one epoch
    held_out: Count  # samples kept for evaluation
    mean_weight: float  # mean loss weight (tokens) of a sample
    layout_digest: str  # of (name, shape, offset) sorted by Hugging Face name
    model_digest: str  # of the model directory's configuration and weights
    data_digest: str
    last_step: Count  # last committed step in its parameters
    cursor: Count  # first position after that step
    memory_cap_bytes: Count | None = None
    system: str = ""  # "Linux", "Darwin": builds of gloo on unlike systems can't join one group
    engines: tuple[Engine, ...] = ()  # what its reducer can load
    model_files: tuple[FileDigest, ...] = ()  # at most 64, so that a difference can be named
    data_files: tuple[FileDigest, ...] = ()  # at most 64


class Alive(Message, tag="alive", frozen=True):
    """Sent at 1 Hz from the control thread, also while the main thread computes."""

    run: Name
    rank: Count
    generation: Generation | None
    step: Count  # the step in progress
    phase: str
    progress: Count | None = None  # grows when the main thread gets on: a phase, a micro-batch
    ready: Ready | None = None  # repeated so that an agent that restarted learns it


class Soon(Message, tag="soon", frozen=True):
    """Gradients of this plan are accumulated: the rank is about to need the next plan."""

    run: Name
    rank: Count
    generation: Generation
    seq: Count


class CheckpointInfo(msgspec.Struct, frozen=True):
    """A complete checkpoint on disk."""

    path: str
    step: Count
    size_bytes: Count
    loop_seconds: float  # what the training loop paid for it


class Report(Message, tag="report", frozen=True):
    """A rank has done a plan. The sums of `train` are global (after the reduce), those of `evaluate` the rank's own."""

    run: Name
    rank: Count
    generation: Generation
    seq: Count
    kind: PlanKind
    step: Count
    loss_sum: float  # sum of the weighted per-token losses, nats
    weight: float  # global weight of the batch (tokens)
    own_weight: float  # this rank's part of it
    own_samples: Count
    grad_norm: float = 0.0  # before clipping
    clip_scale: float = 1.0  # what the gradient was multiplied by
    skipped: str | None = None  # why parameters were not updated: "nan", "overflow"
    micro_batch: Count = 0  # in use at the end of the step
    replays: Count = 0  # micro-batches run again after an out-of-memory error
    phases: Phases = Phases()
    step_seconds: float = 0.0  # from this plan's start to its end, plan wait included
    finished_at: float = 0.0
    memory_bytes: Count | None = None
    memory_peak_bytes: Count | None = None
    memory_cap_bytes: Count | None = None
    checkpoint: CheckpointInfo | None = None
    drift: float | None = None  # sync: largest |own - source| over the source's root mean square, of all parameters
    samples_per_second: float | None = None  # measure: of forward and backward alone


class Probed(Report, tag="probed", kw_only=True, frozen=True):
    """The report of a `probe` plan: what the rank's model says of the first training samples, for comparison."""

    family: str  # model_type in the model's config.json
    tokens_digest: str  # SHA-256 of the tokens
    lengths: tuple[Count, ...]  # targets of each sample
    log_probabilities: bytes  # natural, of each target, one sample after another: float32, little endian
    weight_norms: bytes  # of each trainable parameter, ascending by name, the first 4,096: float32, little endian
    tf32: bool = False  # whether products of float32 matrices may be rounded to TF32


class Fenced(Message, tag="fenced", frozen=True):
    """The answer to Fence: nothing is committed or added under an older generation from here on."""

    run: Name
    rank: Count
    generation: Generation  # the one fenced to
    last_step: Count  # last committed step
    held_from: Generation | None = None  # the generation of the batch the accumulators belong to
    held: tuple[Range, ...] = ()  # positions whose gradients they hold, of step last_step + 1
    reports: tuple[Report, ...] = ()  # the newest ones, oldest first: the agent may have missed them


class Offered(Message, tag="offered", frozen=True):
    """Endpoints opened for a generation."""

    run: Name
    rank: Count
    generation: Generation
    endpoints: tuple[str, ...]  # host:port: gloo one, of its bound store socket; ring as many as links per peer


class Formed(Message, tag="formed", frozen=True):
    """The rank has joined the generation, and stands at its step."""

    run: Name
    rank: Count
    generation: Generation
    join_seconds: float = 0.0  # until the engine had connected all ranks
    level_seconds: float = 0.0  # spent on giving state to the ranks behind


class GroupFailed(Message, tag="group-failed", frozen=True):
    """Joining, levelling or reducing failed; the rank holds what it held and waits for a fence."""

    run: Name
    rank: Count
    generation: Generation
    reason: str  # one line


class TrainerFailed(Message, tag="trainer-failed", frozen=True):
    """The trainer cannot go on; it exits after this."""

    run: Name
    rank: Count
    reason: str  # one line


FromTrainer = Ready | Alive | Soon | Report | Probed | Fenced | Offered | Formed | GroupFailed | TrainerFailed

# ---------------------------------------------------------------- what clients see


class RankView(msgspec.Struct, frozen=True):
    """One rank as the lead knows it."""

    rank: Count
    node: str
    state: RankState  # late: slow at its part; hung: silent, or gets on with nothing; draining: out when that is done
    since_at: float  # when it came to this state
    share: Count  # samples of the global batch
    micro_batch: Count
    why: str = ""  # of a state that is not "run"
    backend: str | None = None
    device: str | None = None
    pid: Count | None = None


class RunView(Message, tag="run-view", frozen=True):
    """One run as its lead knows it; published whenever it changes other than by a committed step."""

    run: Name
    name: str
    state: RunState
    lead: str  # node
    engine: str
    generation: Generation
    step: Count  # last committed
    steps: Count  # total
    plan_version: Count
    global_batch: Count
    samples: Count | None  # N of one epoch, None until a trainer is ready
    cursor: Count
    learning_rate: float
    started_at: float
    ranks: tuple[RankView, ...]
    directory: str
    eval_loss: float | None = None
    eval_step: Count | None = None
    reason: str = ""  # of a failed or stopped run
    mixed: bool = False  # whether its live ranks are of unlike backends
    recording: bool = False  # whether it is played from a recording: no trainer is behind it, and it takes no commands
    boot: str = ""
    seq: Count = 0


class StepCommitted(Message, tag="step-committed", frozen=True):
    """The run has committed a step."""

    run: Name
    generation: Generation
    step: Count
    committed_at: float
    loss: float  # weighted mean, nats per unit of weight
    weight: float  # tokens
    samples: Count
    learning_rate: float
    grad_norm: float  # before clipping
    cursor: Count  # first position after the step
    global_batch: Count
    plan_version: Count
    step_seconds: float  # from the commit before it, pauses excluded
    tokens_total: float  # weight committed since the run began
    skipped: str | None = None
    boot: str = ""
    seq: Count = 0

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of the step / its seconds; None if no time passed."""
        return self.weight / self.step_seconds if self.step_seconds > 0 else None


class RankStep(Message, tag="rank-step", frozen=True):
    """One rank's part of a committed step."""

    run: Name
    generation: Generation
    step: Count
    rank: Count
    node: str
    tokens: float  # weight of its share
    samples: Count
    micro_batch: Count
    replays: Count
    step_seconds: float
    phases: Phases
    memory_bytes: Count | None = None
    memory_peak_bytes: Count | None = None
    memory_cap_bytes: Count | None = None
    boot: str = ""
    seq: Count = 0

    @property
    def own_tokens_per_second(self) -> float | None:
        """What the rank would do alone: tokens / (data + forward + backward)."""
        busy_seconds = self.phases.busy
        return self.tokens / busy_seconds if busy_seconds > 0 else None

    @property
    def peak_or_held_bytes(self) -> int | None:
        """What the step needed of memory: its peak, or what was held after it where no peak is known."""
        return self.memory_bytes if self.memory_peak_bytes is None else self.memory_peak_bytes


SCRIPTED_DEVICE = "scripted"
"""Name of a device whose readings a played recording makes up."""


class GpuReading(msgspec.Struct, frozen=True):
    """One device; what could not be read is None, never zero."""

    name: str
    utilization_percent: float | None = None
    clock_mhz: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    memory_used_bytes: Count | None = None
    memory_total_bytes: Count | None = None


class ProcessReading(msgspec.Struct, frozen=True):
    """One of this program's processes on a node."""

    pid: Count
    role: str  # "agent", "keeper", "trainer", "reducer", "standby", "helper"
    rank: Count | None = None
    cpu_percent: float | None = None  # of one processor, since the reading before
    memory_bytes: Count | None = None  # resident


class HostReading(Message, tag="host-reading", frozen=True):
    """The machine's own state, at 1 Hz."""

    node: str
    read_at: float
    cpu_percent: float | None
    memory_used_bytes: Count | None
    memory_total_bytes: Count | None
    disk_free_bytes: Count | None  # of the disk that holds the runs
    disk_total_bytes: Count | None = None
    load_1min: float | None = None
    temperature_celsius: float | None = None
    gpus: tuple[GpuReading, ...] = ()
    processes: tuple[ProcessReading, ...] = ()  # as published; the record keeps none
    energy_joules: float | None = None  # drawn by its devices for the run since then; None: no power was read
    energy_since_at: float | None = None  # when the run began here; None: there was none yet
    energy_gap_seconds: float = 0.0  # of the time since, in which no power was read
    boot: str = ""
    seq: Count = 0


class Event(Message, tag="event", frozen=True):
    """Something that happened; kept in the record."""

    id: Count  # grows within a run's record
    at: float
    kind: Name  # "command", "run", "rank", "checkpoint", "evaluation", "probe", "agent", "alert" (`after`: its id)
    severity: Severity
    by: str  # who or what caused it: a user name, "auto", a node
    text: str
    run: str = ""
    step: Count | None = None
    generation: Generation | None = None
    command: str | None = None  # its id
    verb: str | None = None
    before: str | None = None
    after: str | None = None
    outcome: CommandState | None = None
    boot: str = ""
    seq: Count = 0


class Heartbeat(Message, tag="heartbeat", frozen=True):
    """Sent at 1 Hz; `seq` is the last sequence number published before it, so a lost message is noticed."""

    node: str
    at: float
    step_age_seconds: float | None  # since the last commit of a running run
    loop_lag_seconds: float  # how late the agent's event loop ran its last timer
    boot: str = ""
    seq: Count = 0


class AlertView(msgspec.Struct, frozen=True):
    """An alert that has been raised and not cleared."""

    id: Name  # kind, node and rank: "disk:studio", "memory:studio:0"; the same when it is raised again
    kind: AlertKind
    severity: AlertSeverity
    text: str  # what is wrong and what is known of its cause, without the node
    raised_at: float
    node: str = ""  # empty: the run as a whole
    rank: Count | None = None
    step: Count | None = None  # last committed when it was raised
    facts: tuple[str, ...] = ()  # phases and readings at hand then, a line each
    acknowledged_by: str | None = None
    muted: bool = False  # by a mute of its kind


class MuteView(msgspec.Struct, frozen=True):
    """A kind of alert that is still kept but calls nobody."""

    kind: AlertKind
    node: str | None  # None: on any node
    until_at: float
    by: str


class Alerts(Message, tag="alerts", frozen=True):
    """All open alerts of an agent, oldest first; published whenever one is raised, cleared, acknowledged or muted."""

    node: str  # whose agent raised them
    alerts: tuple[AlertView, ...] = ()
    mutes: tuple[MuteView, ...] = ()
    boot: str = ""
    seq: Count = 0


Live = RunView | StepCommitted | RankStep | HostReading | Event | Alerts
"""What is published with a sequence number of its own."""

TOPICS: dict[type[Message], bytes] = {
    RunView: b"run",
    StepCommitted: b"step",
    RankStep: b"rank",
    HostReading: b"host",
    Event: b"event",
    Alerts: b"alert",
    Heartbeat: b"beat",
}
"""The first frame of what is published, by the type of the second."""

# ---------------------------------------------------------------- client -> agent


class Request(Message, frozen=True, forbid_unknown_fields=True):
    """The root of what a client asks; `rid` comes back in the reply."""

    rid: Annotated[str, Meta(min_length=1, max_length=64)]


class SnapshotRequest(Request, tag="snapshot-request", frozen=True, forbid_unknown_fields=True):
    """State and history at a resolution; the first half of an attach."""

    columns: Annotated[int, Meta(ge=0, le=2000)] = 120  # buckets wanted in each series
    run: str | None = None  # None: the active run, or else the newest


class HistoryRequest(Request, tag="history-request", frozen=True, forbid_unknown_fields=True):
    """Series of one run between two steps, from the record."""

    run: Name
    metrics: Annotated[tuple[Name, ...], Meta(max_length=16)]  # names of `METRICS`
    first_step: Count = 0
    last_step: Count | None = None
    columns: Annotated[int, Meta(ge=1, le=2000)] = 120


class GapRequest(Request, tag="gap-request", frozen=True, forbid_unknown_fields=True):
    """Live messages that were missed."""

    boot: Name
    first_seq: Count
    last_seq: Count


class RunsRequest(Request, tag="runs-request", frozen=True, forbid_unknown_fields=True):
    """The runs this agent knows."""


class EventsRequest(Request, tag="events-request", frozen=True, forbid_unknown_fields=True):
    """A page of a run's events, oldest first."""

    run: str | None = None
    after_id: Count = 0
    limit: Annotated[int, Meta(ge=1, le=500)] = 200
    newest: bool = False  # the last `limit` instead of the first


class StepsRequest(Request, tag="steps-request", frozen=True, forbid_unknown_fields=True):
    """A page of committed steps, oldest first."""

    run: str | None = None
    after_step: Count = 0
    limit: Annotated[int, Meta(ge=1, le=1000)] = 500


class LogRequest(Request, tag="log-request", frozen=True, forbid_unknown_fields=True):
    """Part of a trainer's log file."""

    run: str | None = None
    rank: Count = 0
    offset_bytes: Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT)] = -65536  # negative: from the end
    limit_bytes: Annotated[int, Meta(ge=1, le=262144)] = 65536


class AttendRequest(Request, tag="attend-request", frozen=True, forbid_unknown_fields=True):
    """Says that somebody is attached, or only asks who is; said every 5 s, and forgotten after 20."""

    viewer: Annotated[str, Meta(max_length=64)] = ""  # one's own id for as long as one is attached; empty: only asks
    by: Annotated[str, Meta(max_length=64)] = ""  # who, as the client tells it
    read_only: bool = False
    leaving: bool = False


class FactsRequest(Request, tag="facts-request", frozen=True, forbid_unknown_fields=True):
    """What a node's machine and installation are like, for `trainctl doctor`."""


class DigestsRequest(Request, tag="digests-request", frozen=True, forbid_unknown_fields=True):
    """Digests of a model's folder or of data on the node; they are read there, which takes as long as the disk does."""

    what: Literal["model", "data"]
    path: Annotated[str, Meta(min_length=1, max_length=4096)]  # absolute


class AuditRequest(Request, tag="audit-request", frozen=True, forbid_unknown_fields=True):
    """Who was refused what, newest first; for operators."""

    limit: Annotated[int, Meta(ge=1, le=500)] = 100


class Command(Request, tag="command", frozen=True, forbid_unknown_fields=True):
    """A request to change something. The same id again gives the same outcome; `rid` is only the reply's address."""

    id: Annotated[str, Meta(pattern=r"^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$")]  # UUID
    verb: Name
    args: dict[str, Any] = {}
    by: Annotated[str, Meta(max_length=64)] = ""  # who, as the client tells it
    node: str | None = None
    run: str | None = None
    if_plan: Count | None = None  # refused if the plan version has moved on
    issued_at: float = 0.0
    ttl_seconds: Annotated[float, Meta(gt=0, le=86400)] = 60.0  # from receipt


ClientRequest = (
    SnapshotRequest
    | HistoryRequest
    | GapRequest
    | RunsRequest
    | EventsRequest
    | StepsRequest
    | LogRequest
    | AttendRequest
    | FactsRequest
    | DigestsRequest
    | AuditRequest
    | Command
)

# ---------------------------------------------------------------- lead's agent -> follower's agent


class PeerHello(Message, tag="peer-hello", frozen=True):
    """Begins a conversation, named by `link`: both sides number what they send from 1, and a gap ends it."""

    link: Name
    lead: str  # node
    address: str  # where the lead takes requests
    generation: Generation | None = None  # highest that the lead knows; a follower that knows a higher term refuses
    run: str | None = None  # the run it conducts


class PeerHost(Message, tag="peer-host", frozen=True):
    """Host a rank: check the run file against this machine, make the run directory, start the trainer."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    config: dict[str, Any]  # the run file as parsed
    generation: Generation
    resume_step: Count | None = None  # the rank begins with this node's checkpoint of that step


class PeerRelay(Message, tag="peer-relay", frozen=True):
    """Pass an order on to a rank's trainer; a plan is journaled first."""

    link: Name
    seq: Count
    rank: Count
    order: ToTrainer


class PeerEnd(Message, tag="peer-end", frozen=True):
    """The run is over, or the rank is not wanted: end its trainer if it still lives."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    state: RunState
    reason: str = ""


class PeerTrainer(Message, tag="peer-trainer", frozen=True):
    """Start the trainer of a rank again, if none lives, or kill it, for it hangs."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    wish: Literal["start", "kill"]


class PeerKeep(Message, tag="peer-keep", frozen=True):
    """What the lead has kept of the run: a follower keeps it too, so that it could conduct the run itself."""

    link: Name
    seq: Count
    run: Name
    items: tuple[bytes, ...]  # each a message of `Kept` in msgpack, in the order in which the lead kept them


class PeerClaim(Message, tag="peer-claim", frozen=True):
    """Whoever says this is to conduct the run in the term told; answered by PeerConsent.

    An agent that conducts it hands it over; any other consents to one claimant a term. In term 0 it only asks: nobody
    consents, and the refusal tells how it stands there.
    """

    link: Name
    seq: Count
    run: Name
    term: Count
    hosted: "HostedRank"  # how far the claimant's record goes
    resume: bool = False  # the run has ended and is to be taken up again: refused by whoever takes part in it


class PeerPing(Message, tag="peer-ping", frozen=True):
    """Sent at 1 Hz; answered by PeerBeat."""

    link: Name
    seq: Count  # last number sent, so that a lost message is noticed


ToPeer = PeerHello | PeerHost | PeerRelay | PeerEnd | PeerTrainer | PeerKeep | PeerClaim | PeerPing

# ---------------------------------------------------------------- what followers keep of a run


class KeptPlan(Message, tag="kept-plan", frozen=True):
    """A plan that the node's own rank has no work in."""

    plan: StepPlan


class KeptStep(Message, tag="kept-step", frozen=True):
    """A committed step."""

    step: StepCommitted


class KeptPart(Message, tag="kept-part", frozen=True):
    """A rank's part of a step that was kept before it."""

    part: RankStep


class KeptEvent(Message, tag="kept-event", frozen=True):
    """An event, under the lead's id."""

    event: Event


class KeptValue(Message, tag="kept-value", frozen=True):
    """One value of a record's `meta` table."""

    key: Name
    value: str


class KeptEvaluation(Message, tag="kept-evaluation", frozen=True):
    """One pass over the held-out samples."""

    step: Count
    at: float
    loss: float  # nats per unit of weight
    weight: float  # tokens
    seconds: float


class KeptDrifts(Message, tag="kept-drifts", frozen=True):
    """By how much each rank's parameters differed from those it was given."""

    step: Count
    at: float
    ranks: tuple[int, ...]
    drifts: tuple[float, ...]  # relative, in parallel


class KeptRetraction(Message, tag="kept-retraction", frozen=True):
    """What comes after a step, and after an event, doesn't stand: others made it, or nobody that is left."""

    after_step: Count
    after_event: Count | None = None  # None: all events stand


class KeptCommand(Message, tag="kept-command", frozen=True):
    """A command as the lead has it in its journal."""

    id: Name
    digest: str
    verb: Name
    args: dict[str, Any]
    by: str
    run: str | None
    node: str | None
    if_plan: Count | None
    received_at: float
    ttl_seconds: float
    state: CommandState
    step: Count | None = None
    reason: str = ""
    field: str | None = None
    before: str | None = None
    after: str | None = None
    ended_at: float | None = None
    plan_version: Count | None = None


Kept = (
    KeptPlan | KeptStep | KeptPart | KeptEvent | KeptValue | KeptEvaluation | KeptDrifts | KeptRetraction | KeptCommand
)
"""What `PeerKeep.items` are made of."""

# ---------------------------------------------------------------- follower's agent -> lead's agent


class HostedRank(msgspec.Struct, frozen=True):
    """A rank that a follower hosts."""

    run: Name
    rank: Count
    pid: Count | None  # None: starting, or gone
    step: Count = 0  # newest committed step in its node's record
    generation: Generation | None = None  # that step's
    event: Count = 0  # id of the newest event there
    seq: Count = 0  # of the newest plan there


class PeerWelcome(Message, tag="peer-welcome", frozen=True):
    """Answer to PeerHello: the conversation stands."""

    link: Name
    node: str
    boot: str
    live_address: str  # where it publishes
    version: str  # of the program
    generation: Generation | None = None  # highest it has seen
    ranks: tuple[HostedRank, ...] = ()


class PeerHosted(Message, tag="peer-hosted", frozen=True):
    """Answer to PeerHost."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    field: str = ""  # what is wrong, empty if the trainer was started
    problem: str = ""
    hosted: HostedRank | None = None  # as far as that node's record goes


class PeerConsent(Message, tag="peer-consent", frozen=True):
    """Answer to PeerClaim."""

    link: Name
    seq: Count
    run: Name
    term: Count  # the claimed one; of a refusal, the highest that a claimant was told or that was seen
    refusal: str = ""  # why not, empty if so
    hosted: HostedRank | None = None  # how far this node's record goes, if it has one of the run
    items: tuple[bytes, ...] = ()  # what it has beyond the claimant's, as in PeerKeep
    takes_part: bool = False  # of a refusal: this node takes part in an active run


class PeerAnswer(Message, tag="peer-answer", frozen=True):
    """What a trainer said."""

    link: Name
    seq: Count
    answer: FromTrainer
    returned: bool = False  # it speaks over a new connection


class PeerExit(Message, tag="peer-exit", frozen=True):
    """A trainer's process has ended."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    clean: bool
    why: str
    memory: str = ""  # what says that it died for want of memory; empty: nothing does


class PeerBeat(Message, tag="peer-beat", frozen=True):
    """Answer to PeerPing."""

    link: Name
    seq: Count  # last number sent
    ranks: tuple[HostedRank, ...] = ()
    loop_lag_seconds: float = 0.0
    host: HostReading | None = None  # its machine's newest


class PeerRefusal(Message, tag="peer-refusal", frozen=True):
    """The conversation is not known here, or this agent follows another lead."""

    link: Name
    code: Literal["unknown-link", "older-term", "busy", "not-authorised"]
    text: str
    run: str | None = None  # older-term: the one that the lead said it conducts
    state: RunState | None = None  # that run's, as it is known here; None: not known
    reason: str = ""  # of that state


FromPeer = PeerWelcome | PeerHosted | PeerConsent | PeerAnswer | PeerExit | PeerBeat | PeerRefusal

# ---------------------------------------------------------------- agent -> client


class Series(msgspec.Struct, frozen=True):
    """One metric in buckets of `bucket_steps` steps; the lists run in parallel."""

    metric: Name
    rank: Count | None  # None: of the run
    bucket_steps: Annotated[int, Meta(ge=1)]
    steps: tuple[int, ...]  # first step of each bucket; a bucket without a step is absent
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    mean: tuple[float, ...]
    last: tuple[float, ...]


class Reply(Message, frozen=True):
    """The root of what an agent answers."""

    rid: str


class NodeView(msgspec.Struct, frozen=True):
    """One agent."""

    node: str
    boot: str
    address: str
    live_address: str  # where it publishes
    host: HostReading | None
    version: str  # of the program


class PeerView(msgspec.Struct, frozen=True):
    """Another node of the cluster as this one's agent sees it."""

    node: str
    address: str
    live_address: str | None  # None: it has not been reached yet
    state: Literal["connected", "silent", "unknown"]
    since_at: float
    why: str = ""
    key: str | None = None  # its agent's public key, Z85; None: it has none, or isn't known


class Snapshot(Reply, tag="snapshot", frozen=True):
    """All a screen needs to open; live messages at or below `seq` are already in it."""

    boot: str
    seq: Count
    at: float
    node: NodeView
    run: RunView | None
    last_step: StepCommitted | None
    rank_steps: tuple[RankStep, ...]
    events: tuple[Event, ...]  # newest 100, oldest first
    series: tuple[Series, ...]
    peers: tuple[PeerView, ...] = ()  # the cluster's other nodes
    alerts: Alerts | None = None  # open ones; None: of a run that was named and isn't active


class History(Reply, tag="history", frozen=True):
    series: tuple[Series, ...]


class GapFill(Reply, tag="gap-fill", frozen=True):
    """`complete` is False when some are no longer kept: attach again."""

    complete: bool
    messages: tuple[Live, ...]


class RunSummary(msgspec.Struct, frozen=True):
    """One line of `trainctl ls`."""

    run: Name
    name: str
    state: RunState
    step: Count
    steps: Count
    last_loss: float | None
    started_at: float
    directory: str
    lead: str = ""  # node that conducts it, or did last
    nodes: tuple[str, ...] = ()  # of its ranks
    last_step_at: float | None = None  # when the last step was committed
    stale: bool = False  # another node leads it and is out of reach: this is how it was when that took it over


class Runs(Reply, tag="runs", frozen=True):
    runs: tuple[RunSummary, ...]  # newest first


class Events(Reply, tag="events", frozen=True):
    run: str | None
    events: tuple[Event, ...]
    more: bool


class Steps(Reply, tag="steps", frozen=True):
    run: str | None
    steps: tuple[StepCommitted, ...]
    more: bool


class LogPart(Reply, tag="log-part", frozen=True):
    run: str | None
    rank: Count
    offset_bytes: Count  # of the first byte of text
    size_bytes: Count  # of the whole file
    text: str


class Viewer(msgspec.Struct, frozen=True):
    """Somebody who is attached."""

    by: str
    since_at: float
    read_only: bool = False


class Viewers(Reply, tag="viewers", frozen=True):
    """Those attached but for who asked, oldest first."""

    viewers: tuple[Viewer, ...]


class InterfaceFacts(msgspec.Struct, frozen=True):
    """A network interface."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]  # IPv4 with the prefix's length: 192.168.1.5/24


class FileFacts(msgspec.Struct, frozen=True):
    """Who may open a file or folder."""

    path: str
    mode: Count  # permission bits, as chmod takes them
    is_own: bool  # it belongs to the agent's user


class Facts(Reply, tag="facts", frozen=True):
    """A node's machine and installation as its agent finds them; None where that can't be told."""

    node: str
    received_at: float  # when the request was, by that machine's clock
    at: float  # when this was sent
    version: str  # of the program
    python: str
    system: str  # "Linux", "Darwin"
    release: str
    machine: str  # "arm64"
    libraries: dict[str, str]  # name -> version of those that matter and are installed
    environment: dict[str, str]  # of the agent, which trainers inherit: the variables that matter and are set
    keys_folder: str
    key_files: tuple[FileFacts, ...]  # the folder and what is in it; none if there is none
    state_folder: str  # where runs are kept
    disk_free_bytes: Count | None
    disk_total_bytes: Count | None
    memory_total_bytes: Count | None
    memory_limit_bytes: Count | None  # of the agent's control group; None: no limit, or not known
    open_files: Count | None  # soft limit (ulimit -n); None: no limit
    interfaces: tuple[InterfaceFacts, ...]
    on_battery: bool | None
    battery_percent: float | None
    lid_closed: bool | None


class Digests(Reply, tag="digests", frozen=True):
    """SHA-256 of files, over name, size and content."""

    digest: str  # of all together; empty if there is a problem
    files: tuple[FileDigest, ...] = ()  # at most 64: the last stands for the rest
    problem: str = ""  # why there is none


class Refused(msgspec.Struct, frozen=True):
    """Something that was refused for want of a right, as often as `count` says."""

    first_at: float
    last_at: float
    count: Count
    name: str  # of the key; empty: it has none here
    key: str  # Z85; empty: none was shown
    what: str  # "command pause", "snapshot-request", "connect"
    why: str
    address: str = ""  # IP address that it came from, as far as it is known


class Audit(Reply, tag="audit", frozen=True):
    refused: tuple[Refused, ...]  # newest first


class CommandReply(Reply, tag="command-reply", frozen=True):
    """Sent once when a command is accepted or refused, and once more when an accepted one ends."""

    id: str
    state: CommandState
    step: Count | None = None  # applied: the step it took effect at
    reason: str = ""
    field: str | None = None  # rejected: the argument at fault
    before: str | None = None
    after: str | None = None
    plan_version: Count | None = None
    run: str | None = None  # the run it was about


class Refusal(Reply, tag="refusal", frozen=True):
    """The request was understood, and the answer is no."""

    code: Literal[
        "version", "malformed", "unknown-run", "unknown-rank", "unknown-type", "busy", "not-lead", "not-authorised"
    ]
    text: str
    lead: str | None = None  # not-lead: the address of the agent that conducts
    lead_key: str | None = None  # not-lead: that agent's public key, Z85


AgentReply = (
    Snapshot
    | History
    | GapFill
    | Runs
    | Events
    | Steps
    | LogPart
    | Viewers
    | Facts
    | Digests
    | Audit
    | CommandReply
    | Refusal
)

METRICS: dict[str, tuple[str, bool]] = {
    "loss": ("nats per token", False),
    "grad_norm": ("", False),
    "learning_rate": ("", False),
    "step_seconds": ("s", False),
    "tokens_per_second": ("tokens/s", False),
    "loss_not_finite": ("1 at such a step", False),
    "grad_norm_not_finite": ("1 at such a step", False),
    "tokens_total": ("tokens, min and max at a bucket's ends", False),
    "committed_at": ("Unix s, min and max at a bucket's ends", False),
    "eval_loss": ("nats per token", False),
    "rank_step_seconds": ("s", True),
    "busy_seconds": ("s", True),
    "own_tokens_per_second": ("tokens/s", True),
    "data_seconds": ("s", True),
    "forward_seconds": ("s", True),
    "backward_seconds": ("s", True),
    "sync_seconds": ("s", True),
    "optimizer_seconds": ("s", True),
    "wait_seconds": ("s", True),
    "memory_bytes": ("B", True),
    "memory_peak_bytes": ("B", True),
    "drift": ("relative", True),
}
"""What history can be asked for: name -> (unit, whether it is kept per rank)."""

UNIONS: dict[str, Any] = {
    "client to agent": ClientRequest,
    "agent to client": AgentReply,
    "published by an agent": Live | Heartbeat,
    "agent to trainer": ToTrainer,
    "trainer to agent": FromTrainer,
    "lead to follower": ToPeer,
    "follower to lead": FromPeer,
    "kept by followers": Kept,
}
"""The seven conversations and the types each takes, and what followers keep of a run."""


def types_of(conversation: str) -> tuple[type[Message], ...]:
    """The message types of a conversation, in the order of its union."""
    return typing.get_args(UNIONS[conversation])


def tag_of(kind: type[Message]) -> str:
    """The value of a message's `type`."""
    return str(kind.__struct_config__.tag)
