"""Replies from an agent to a client."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.calibration.profile import DeviceProfile, Rate
from trainctl.protocol.config.policies import PolicyMode
from trainctl.protocol.messages.base import CommandState, Count, Message, Name, RunKind, RunState, WorkKind, WorkState
from trainctl.protocol.messages.diagnosis import Diagnosis
from trainctl.protocol.messages.telemetry import (
    Alerts,
    BranchPoint,
    Event,
    HeldOutPairs,
    HostReading,
    Live,
    RankStep,
    RunCost,
    RunView,
    Sample,
    StepCommitted,
)
from trainctl.protocol.messages.trainer import DeviceTypes, FileDigest


class Series(msgspec.Struct, frozen=True):
    """One metric in buckets of `bucket_steps` steps. All lists have one entry per bucket."""

    metric: Name
    rank: Count | None  # rank number; None: the whole run
    bucket_steps: Annotated[int, Meta(ge=1)]
    steps: tuple[int, ...]  # first step of each bucket; empty buckets are absent
    minimum: tuple[float, ...]
    maximum: tuple[float, ...]
    mean: tuple[float, ...]
    last: tuple[float, ...]


class Reply(Message, frozen=True):
    """The base of all replies."""

    rid: str


class NodeView(msgspec.Struct, frozen=True):
    """The agent that replies."""

    node: str
    boot: str
    address: str
    live_address: str  # address where it publishes live messages
    host: HostReading | None
    version: str  # trainctl version


class PeerView(msgspec.Struct, frozen=True):
    """A different node of the cluster, as this agent sees it."""

    node: str
    address: str
    live_address: str | None  # address where it publishes; None: not reached yet
    state: Literal["connected", "silent", "unknown"]
    since_at: float
    why: str = ""
    key: str | None = None  # public key of its agent, Z85; None: no key, or unknown


class RunRates(msgspec.Struct, frozen=True):
    """A run's speed and remaining time; None: unknown."""

    unit: str  # unit of the average, for example tokens/s or pairs/s
    average_per_second: float | None = None  # average since the run began, excluding pauses
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_per_sample: float | None = None
    seconds_per_epoch: float | None = None
    epochs_left: float | None = None  # epochs until the run's last step
    seconds_left: float | None = None  # expected time until the run's end; None: unknown, or the run has ended
    seconds_left_best: float | None = None  # in the best case; None: unknown
    seconds_left_worst: float | None = None  # in the worst case; about 92 of 100 runs take between the two


class RunSummary(msgspec.Struct, frozen=True):
    """One run in a list of runs."""

    run: Name
    name: str
    state: RunState
    step: Count  # last committed step
    steps: Count | None  # total number of steps; None: unknown
    last_loss: float | None
    started_at: float
    directory: str
    lead: str = ""  # node that leads it, or led it last
    nodes: tuple[str, ...] = ()  # nodes that host its ranks
    last_step_at: float | None = None  # commit time of the last step, in Unix seconds
    stale: bool = False  # whether the data is outdated because its lead is unreachable
    kind: RunKind = "hosted"
    cursor: Count | None = None  # first unused position in the sequence of samples; None: unknown
    rates: RunRates | None = None  # speed and remaining time as of the run's last step
    cost: RunCost | None = None  # cost so far; None: none of its nodes has a price
    simulated: bool = False  # whether nothing was trained: ranks, times and losses are simulated
    branch: BranchPoint | None = None  # checkpoint of another run that it started from; None: it started at step 0
    global_batch: Count | None = None  # samples of each step; None: unknown
    size_bytes: Count | None = None  # what its removal from the agent's node would free of the disk; None: unknown


class Snapshot(Reply, tag="snapshot", frozen=True):
    """Everything that a screen needs to open. It includes all live messages up to `seq`."""

    boot: str
    seq: Count
    at: float
    node: NodeView
    run: RunView | None
    last_step: StepCommitted | None
    rank_steps: tuple[RankStep, ...]
    events: tuple[Event, ...]  # newest 100 events, oldest first
    series: tuple[Series, ...]
    peers: tuple[PeerView, ...] = ()  # other nodes of the cluster
    alerts: Alerts | None = None  # open alerts; None: the requested run isn't active
    runs: tuple[RunSummary, ...] = ()  # all live runs of this agent, hosted run first


class History(Reply, tag="history", frozen=True):
    """The requested series of a run."""

    series: tuple[Series, ...]
    own_metrics: tuple[str, ...] = ()  # names of the metrics that the run defined
    values_from: Count = 0  # first step with individual values of metrics by name; older steps have only buckets


class GapFill(Reply, tag="gap-fill", frozen=True):
    """The missed messages that the agent still has."""

    complete: bool
    messages: tuple[Live, ...]


class Runs(Reply, tag="runs", frozen=True):
    """The runs that the agent knows."""

    runs: tuple[RunSummary, ...]  # runs, newest first


class Events(Reply, tag="events", frozen=True):
    """A page of a run's events."""

    run: str | None
    events: tuple[Event, ...]
    more: bool


class Steps(Reply, tag="steps", frozen=True):
    """A page of a run's committed steps."""

    run: str | None
    steps: tuple[StepCommitted, ...]
    more: bool


class Hosts(Reply, tag="hosts", frozen=True):
    """A page of readings from a run's machines."""

    run: str | None
    readings: tuple[HostReading, ...]  # one reading per node every 10 s, kept for a week
    last_row: Count  # last row of this page; use it as the next `after_row`
    more: bool


class Samples(Reply, tag="samples", frozen=True):
    """A page of the model's answers."""

    run: str | None
    samples: tuple[Sample, ...]  # answers, oldest first
    last_row: Count  # last row of this page; use it as the next `after_row`
    more: bool


class StepProfiles(Reply, tag="traces", frozen=True):
    """Profiles of a run's steps."""

    run: str | None
    profiles: tuple[Event, ...]  # events of profiles, oldest first


TRACE_PART_BYTES = 60 * 1024
"""Size of the parts in which a trace is sent."""


class TracePart(Reply, tag="trace-part", frozen=True):
    """Part of a trace's file; it is shorter than 60 KiB only at the end."""

    offset_bytes: Count  # file offset of the first byte of `data`
    size_bytes: Count  # total size of the file
    data: bytes  # contents of this part


RECORD_PART_BYTES = TRACE_PART_BYTES
"""Size of the parts in which a record is sent."""


class RecordPart(Reply, tag="record-part", frozen=True):
    """Part of a copy of a run's record, an SQLite file; it is shorter than 60 KiB only at the end. The digest of all
    parts together is `digest`."""

    run: str  # ID of the run
    digest: str  # SHA-256 digest of the copy, by which its other parts are requested
    offset_bytes: Count  # offset in the copy of the first byte of `data`
    size_bytes: Count  # total size of the copy
    data: bytes  # contents of this part


class Pairs(Reply, tag="pairs", frozen=True):
    """Held-out pairs with their rewards."""

    run: str | None
    evaluations: tuple[HeldOutPairs, ...]  # newest evaluation of each step, oldest first


class PolicyFigure(msgspec.Struct, frozen=True):
    """A value that a policy watches, and its threshold."""

    what: str
    value: float | None  # newest value; None: not known yet
    threshold: float | None = None  # None: the value is only shown
    unit: str = ""  # unit of both; part: a fraction, shown in percent
    acts: Literal["above", "below", "at"] = "above"  # where the policy acts; at: from the threshold on


class PolicyStatus(msgspec.Struct, frozen=True):
    """A policy of the run: what it sees now, and what it would do next."""

    name: str
    mode: PolicyMode
    figures: tuple[PolicyFigure, ...] = ()  # empty while it is off
    command: str = ""  # command that it would send or advise now, as typed on the command line; empty: none
    why: str = ""  # reason for the command, or what makes the policy act
    waits: str = ""  # what the command waits for; empty: nothing
    actions: tuple[Event, ...] = ()  # its newest commands, oldest first


class Policies(Reply, tag="policies", frozen=True):
    """The policies of an active run."""

    run: str
    step: Count  # last committed step
    policies: tuple[PolicyStatus, ...]


class RankForecast(msgspec.Struct, frozen=True, kw_only=True):
    """One rank before a command and after it."""

    rank: Count
    node: str
    share_before: Count | None  # samples of a global batch; null: it takes none
    share: Count | None  # after the command
    micro_before: Count | None  # micro-batch in force
    micro: Count | None  # after the command
    seconds: float | None = None  # predicted own time of a step, without waits
    memory_bytes: float | None = None  # predicted peak
    memory_is_bound: bool = False  # whether it is at most that
    memory_cap_bytes: float | None = None  # most that the rank may use


class DryRun(Reply, tag="dry-run", frozen=True):
    """Effect that a command would have now. Nothing has changed, and nothing was recorded."""

    run: str
    verb: str
    refused: str = ""  # why it would be refused; empty: it would be accepted
    field: str | None = None  # refused: invalid argument
    step: Count | None = None  # step at which it would take effect, if no other plan comes before; null: not known
    before: str | None = None  # as in the reply to the command
    after: str | None = None  # as in the reply to the command
    plan_version: Count = 0  # that it was judged by
    learning_rate: float | None = None  # of that step
    global_batch: Count | None = None
    step_seconds_before: float | None = None  # predicted time of a step, without the sum; null: not measured
    step_seconds: float | None = None
    ranks: tuple[RankForecast, ...] = ()  # all ranks whose settings it changes
    advising: tuple[str, ...] = ()  # policies that are on, and would then only advise


class DiagnosisReply(Reply, tag="diagnosis", frozen=True):
    """Names the reasons for which a run is slow or stuck."""

    run: str
    live: bool  # whether the run is active and was judged as it is now
    diagnosis: Diagnosis  # the causes, and all that was checked


class LogPart(Reply, tag="log-part", frozen=True):
    """Part of a trainer's log file."""

    run: str | None
    rank: Count
    offset_bytes: Count  # file offset of the first byte of `text`; no character is divided there or at its end
    size_bytes: Count  # total size of the file
    text: str
    end_bytes: Count | None = None  # file offset after the last byte of `text`; None: the agent doesn't say


class Viewer(msgspec.Struct, frozen=True):
    """An attached client."""

    by: str
    since_at: float
    read_only: bool = False


class Viewers(Reply, tag="viewers", frozen=True):
    """All attached clients except the one that asked, oldest first."""

    viewers: tuple[Viewer, ...]


class InterfaceFacts(msgspec.Struct, frozen=True):
    """A network interface."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]  # IPv4 addresses with prefix length, for example 192.168.1.5/24


class FileFacts(msgspec.Struct, frozen=True):
    """Permissions of a file or folder."""

    path: str
    mode: Count  # permission bits, as for chmod
    is_own: bool  # whether the agent's user owns it


class Facts(Reply, tag="facts", frozen=True):
    """Facts about a node's machine and installation; None: unknown."""

    node: str
    received_at: float  # time when the request arrived, by that machine's clock
    at: float  # time when the reply was sent, by the same clock
    version: str  # trainctl version
    python: str
    system: str  # operating system: Linux or Darwin
    release: str
    machine: str  # architecture, for example arm64 or x86_64
    libraries: dict[str, str]  # versions of relevant libraries, by name
    environment: dict[str, str]  # relevant environment variables of the agent; trainers inherit them
    keys_folder: str
    key_files: tuple[FileFacts, ...]  # the keys folder and its files; empty: no such folder
    state_folder: str  # folder that stores the runs
    disk_free_bytes: Count | None
    disk_total_bytes: Count | None
    memory_total_bytes: Count | None
    memory_limit_bytes: Count | None  # limit of the agent's control group; None: no limit, or unknown
    open_files: Count | None  # soft limit on open files (ulimit -n); None: no limit
    interfaces: tuple[InterfaceFacts, ...]
    on_battery: bool | None
    battery_percent: float | None
    lid_closed: bool | None
    cpu_count: Count | None = None  # processors of the machine, whatever the agent may use of them
    boot: str | None = None  # identifies this boot of the machine: equal for agents of one machine
    cpu_quota: float | None = (
        None  # cores that control groups let the agent and its ranks use; None: no limit, or unknown
    )
    compiler: str | None = None  # path of the C++ compiler that torch.compile uses; None: not found, or unknown
    compile_lacks: dict[str, tuple[str, ...]] | None = (
        None  # what torch.compile needs and isn't there, by kind of the machine's devices (cpu, cuda, mps)
    )
    namesakes: tuple[str, ...] = ()  # installed packages with trainctl's names that aren't this program, with versions
    lost_sockets: tuple[str, ...] = ()  # the agent's Unix sockets whose files are gone and can't be made again yet
    devices: tuple[DeviceTypes, ...] = ()  # devices that it can compute on, each backend's default first


class Digests(Reply, tag="digests", frozen=True):
    """SHA-256 digests of files, each computed from name, size and content."""

    digest: str  # digest of all files together; empty: see `problem`
    files: tuple[FileDigest, ...] = ()  # digests per file, at most 64; the last one covers the rest
    problem: str = ""  # reason why there is no digest; else empty
    named: bool = True  # whether a run file on the node names the path; if not, nothing was read


class Disk(Reply, tag="disk", frozen=True):
    """The measured speed of a disk."""

    folder: str  # folder in which the file was written: the requested one, or the one above it
    write_bytes_per_second: float | None = None  # including the wait until the data is on the disk
    read_bytes_per_second: float | None = None  # without the system's cache; null: it can't be bypassed there
    problem: str = ""  # reason why there is no speed; else empty
    named: bool = True  # whether a run file on the node names the folder; if not, nothing was written


class Calibration(Reply, tag="calibration", frozen=True):
    """The state of a calibration of the agent's node."""

    state: Literal["running", "finished", "failed"]  # whether it is in progress, or how it ended
    progress: tuple[str, ...] = ()  # what has been measured, one line each, oldest first
    profile: DeviceProfile | None = None  # finished: the result, which the node has stored
    earlier: DeviceProfile | None = None  # finished: the newest comparable profile before it; None: there is none
    problem: str = ""  # failed: reason
    waits: Annotated[int, Meta(ge=0, le=3)] = 0  # beside others: stage that it is ready for; 0: none


class Calibrations(Reply, tag="profiles", frozen=True):
    """Stored profiles of the agent's node."""

    profiles: tuple[DeviceProfile, ...]  # newest first


class LinkReply(Reply, tag="link-reply", frozen=True):
    """Answer to link-request."""

    port: Annotated[int, Meta(ge=1, le=65535)]  # TCP port at the agent's address that takes one connection
    bytes_per_second: Rate | None = None  # received from the node that asks; null: not measured yet, or not possible


class Refused(msgspec.Struct, frozen=True):
    """A request that was refused because of missing permissions."""

    first_at: float
    last_at: float
    count: Count
    name: str  # name of the key; empty: the agent doesn't know the key
    key: str  # public key, Z85; empty: the client had none
    what: str  # refused request, for example command pause, snapshot-request or connect
    why: str
    address: str = ""  # client's IP address; empty: unknown


class Audit(Reply, tag="audit", frozen=True):
    """The requests that were refused because of missing permissions."""

    refused: tuple[Refused, ...]  # refusals, newest first


class HookOutcome(msgspec.Struct, frozen=True):
    """The outcome of a call of an alert hook."""

    hook: str  # command or webhook
    problem: str  # what went wrong; empty: nothing


class HookTest(Reply, tag="hook-test", frozen=True):
    """The outcome of a call of each alert hook that the agent has."""

    outcomes: tuple[HookOutcome, ...]  # the command's before the webhook's; empty: the agent has no hooks


class RunEdited(Reply, tag="run-edited", frozen=True):
    """A run was renamed, or removed."""

    freed_bytes: Count  # space on the disk that was freed


class RunKept(Reply, tag="run-kept", frozen=True):
    """Confirms the newest recorded step of an attached run. The program must resend any steps after it."""

    run: str
    step: Count  # newest recorded step; 0: none yet
    directory: str  # folder where the agent keeps the run's files


class WorkNode(msgspec.Struct, frozen=True):
    """One node that takes part in separate work."""

    node: str
    state: Literal["starting", "working", "silent", "failed"]
    device: str = ""
    rows: Count = 0  # rows that it has answered
    rows_per_second: float | None = None  # speed over its last slices; None: unknown
    why: str = ""  # reason, unless it works


class WorkView(msgspec.Struct, frozen=True):
    """The state of separate work."""

    work: str  # work ID
    kind: WorkKind
    run: str
    checkpoint: Count  # step of the checkpoint
    state: WorkState
    rows: Count  # number of rows
    answered: Count  # rows that have a result
    received_bytes: Count  # size of the received part of the rows
    nodes: tuple[WorkNode, ...] = ()
    reason: str = ""  # failed: reason


class WorkSummary(msgspec.Struct, frozen=True):
    """Separate work in a list. It is forgotten once its client has the results."""

    lead: str  # node that leads it
    view: WorkView
    file: str = ""  # name of the file with the rows; empty: unknown
    slices: Count = 0  # slices dealt so far; how many follow isn't known
    slices_answered: Count = 0
    rows_per_second: float | None = None  # speed of all nodes together; None: unknown
    seconds_left: float | None = None  # time until all rows are answered; None: unknown, or the work has ended

    @property
    def is_active(self) -> bool:
        """Return whether the work is in progress."""
        return self.view.state in ("receiving", "running")


class Works(Reply, tag="works", frozen=True):
    """The separate work of a node."""

    works: tuple[WorkSummary, ...] = ()  # work that it leads first; work that failed stays until the next


class WorkStatus(Reply, tag="work-status", frozen=True):
    """The state of separate work, and results if they were requested."""

    view: WorkView
    results: tuple[bytes, ...] = ()  # one JSON object per row, in row order, from `after_row` on


class WorkHosted(Reply, tag="work-hosted", frozen=True):
    """Answer to host-work."""

    problem: str = ""  # reason why there is no worker; empty: it is starting or working


class WorkFilePart(Reply, tag="work-file-part", frozen=True):
    """Part of a file of a checkpoint; empty at its end."""

    data: bytes


class SliceReply(Reply, tag="slice-reply", frozen=True):
    """Answer to slice-request."""

    slice: Count | None = None  # ID of the slice to process; None: none at the moment
    first: Count = 0  # index of its first row; the first row of the work has index 0
    rows: tuple[str, ...] = ()  # its rows as JSON objects
    ended: bool = False  # whether the work is over: end the worker


class CommandReply(Reply, tag="command-reply", frozen=True):
    """The first reply says whether the command is accepted. An accepted command gets a second reply when it ends."""

    id: str
    state: CommandState
    step: Count | None = None  # applied: step at which it took effect
    reason: str = ""
    field: str | None = None  # rejected: invalid argument
    before: str | None = None
    after: str | None = None
    plan_version: Count | None = None
    run: str | None = None  # run ID


class Refusal(Reply, tag="refusal", frozen=True):
    """The agent refused a request."""

    code: Literal[
        "version", "malformed", "unknown-run", "unknown-rank", "unknown-type", "busy", "not-lead", "not-authorised"
    ]
    text: str
    lead: str | None = None  # not-lead: address of the lead's agent
    lead_key: str | None = None  # not-lead: public key of the lead's agent, Z85


AgentReply = (
    Snapshot
    | History
    | GapFill
    | Runs
    | Events
    | Steps
    | Hosts
    | Samples
    | Pairs
    | Policies
    | DryRun
    | DiagnosisReply
    | LogPart
    | Viewers
    | Facts
    | Digests
    | Disk
    | Calibration
    | Calibrations
    | LinkReply
    | Audit
    | HookTest
    | RunEdited
    | RunKept
    | Works
    | WorkStatus
    | StepProfiles
    | TracePart
    | RecordPart
    | WorkHosted
    | WorkFilePart
    | SliceReply
    | CommandReply
    | Refusal
)
