"""Replies of an agent to a client."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import CommandState, Count, Message, Name, RunKind, RunState
from trainctl.protocol.messages.telemetry import Alerts, Event, HostReading, Live, RankStep, RunView, StepCommitted
from trainctl.protocol.messages.trainer import FileDigest


class Series(msgspec.Struct, frozen=True):
    """One metric in buckets of `bucket_steps` steps; the lists run in parallel."""

    metric: Name
    rank: Count | None  # None: the whole run
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
    """The agent that answers."""

    node: str
    boot: str
    address: str
    live_address: str  # where it publishes
    host: HostReading | None
    version: str  # version of the program


class PeerView(msgspec.Struct, frozen=True):
    """Another node of the cluster, as this agent sees it."""

    node: str
    address: str
    live_address: str | None  # None: it has not been reached yet
    state: Literal["connected", "silent", "unknown"]
    since_at: float
    why: str = ""
    key: str | None = None  # public key of its agent, Z85; None: none, or not known


class RunRates(msgspec.Struct, frozen=True):
    """How fast a run is, and how long it still takes; None: not known."""

    unit: str  # unit of the average: tokens/s, or pairs/s if the loss is divided by pairs
    average_per_second: float | None = None  # since the run began, pauses excluded
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_per_sample: float | None = None
    seconds_per_epoch: float | None = None
    epochs_left: float | None = None  # until the run's last step
    seconds_left: float | None = None  # until the run's last step; None: not known, or the run has ended


class RunSummary(msgspec.Struct, frozen=True):
    """One run in a list."""

    run: Name
    name: str
    state: RunState
    step: Count
    steps: Count | None  # steps in all; None: not known
    last_loss: float | None
    started_at: float
    directory: str
    lead: str = ""  # node that leads it, or did last
    nodes: tuple[str, ...] = ()  # nodes of its ranks
    last_step_at: float | None = None  # when the last step was committed
    stale: bool = False  # its lead is out of reach: this is how it was before that node led it
    kind: RunKind = "hosted"
    rates: RunRates | None = None  # how fast it is, by its last step


class Snapshot(Reply, tag="snapshot", frozen=True):
    """All that a screen needs to open. It includes live messages up to `seq`."""

    boot: str
    seq: Count
    at: float
    node: NodeView
    run: RunView | None
    last_step: StepCommitted | None
    rank_steps: tuple[RankStep, ...]
    events: tuple[Event, ...]  # the newest 100, oldest first
    series: tuple[Series, ...]
    peers: tuple[PeerView, ...] = ()  # the cluster's other nodes
    alerts: Alerts | None = None  # open alerts; None: the run asked for is not active
    runs: tuple[RunSummary, ...] = ()  # all live runs of this agent, the hosted one first


class History(Reply, tag="history", frozen=True):
    """Series of a run."""

    series: tuple[Series, ...]
    own_metrics: tuple[str, ...] = ()  # names of the metrics that the run brought
    values_from: Count = 0  # first step whose metrics by name are kept one by one, not only in larger buckets


class GapFill(Reply, tag="gap-fill", frozen=True):
    """`complete` is False when some messages are no longer kept: attach again."""

    complete: bool
    messages: tuple[Live, ...]


class Runs(Reply, tag="runs", frozen=True):
    """The runs that the agent knows."""

    runs: tuple[RunSummary, ...]  # newest first


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
    """A page of readings of a run's machines."""

    run: str | None
    readings: tuple[HostReading, ...]  # one per node and 10 s; kept for a week
    last_row: Count  # row of the last one looked at: ask again with it as `after_row`
    more: bool


class LogPart(Reply, tag="log-part", frozen=True):
    """Part of a trainer's log file."""

    run: str | None
    rank: Count
    offset_bytes: Count  # place of the first byte of `text`
    size_bytes: Count  # size of the whole file
    text: str


class Viewer(msgspec.Struct, frozen=True):
    """A client that is attached."""

    by: str
    since_at: float
    read_only: bool = False


class Viewers(Reply, tag="viewers", frozen=True):
    """The attached clients without the one that asked, oldest first."""

    viewers: tuple[Viewer, ...]


class InterfaceFacts(msgspec.Struct, frozen=True):
    """A network interface."""

    name: str
    is_up: bool
    addresses: tuple[str, ...]  # IPv4 with prefix length: 192.168.1.5/24


class FileFacts(msgspec.Struct, frozen=True):
    """Permissions of a file or folder."""

    path: str
    mode: Count  # permission bits, as chmod takes them
    is_own: bool  # whether it belongs to the agent's user


class Facts(Reply, tag="facts", frozen=True):
    """A node's machine and installation as its agent finds them; None: not known."""

    node: str
    received_at: float  # when the request arrived, by that machine's clock
    at: float  # when this was sent, by the same clock
    version: str  # version of the program
    python: str
    system: str  # Linux, Darwin
    release: str
    machine: str  # arm64, x86_64
    libraries: dict[str, str]  # versions of the installed libraries that matter, by name
    environment: dict[str, str]  # the agent's variables that matter; trainers inherit them
    keys_folder: str
    key_files: tuple[FileFacts, ...]  # the folder and its files; empty: there is none
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
    """SHA-256 digests of files, each over name, size and content."""

    digest: str  # of all files together; empty: see `problem`
    files: tuple[FileDigest, ...] = ()  # at most 64; the last stands for the rest
    problem: str = ""  # why there is no digest


class Refused(msgspec.Struct, frozen=True):
    """Something that was refused for lack of a right, `count` times."""

    first_at: float
    last_at: float
    count: Count
    name: str  # name of the key; empty: it has none here
    key: str  # public key, Z85; empty: none was shown
    what: str  # what was asked: command pause, snapshot-request, connect
    why: str
    address: str = ""  # IP address that it came from; empty: not known


class Audit(Reply, tag="audit", frozen=True):
    """What was refused for lack of a right."""

    refused: tuple[Refused, ...]  # newest first


class RunKept(Reply, tag="run-kept", frozen=True):
    """How far an attached run is recorded. The program sends the steps after that, again if necessary."""

    run: str
    step: Count  # newest recorded step; 0: none
    directory: str  # folder in which the agent keeps the run


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
    """The agent refuses a request."""

    code: Literal[
        "version", "malformed", "unknown-run", "unknown-rank", "unknown-type", "busy", "not-lead", "not-authorised"
    ]
    text: str
    lead: str | None = None  # not-lead: address of the lead's agent
    lead_key: str | None = None  # not-lead: public key of the lead's agent, Z85


AgentReply = (
    Snapshot | History | GapFill | Runs | Events | Steps | Hosts | LogPart | Viewers | Facts | Digests | Audit | RunKept
    | CommandReply | Refusal
)  # fmt: skip
