"""What an agent answers a client."""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import CommandState, Count, Message, Name, RunKind, RunState
from trainctl.protocol.messages.telemetry import Alerts, Event, HostReading, Live, RankStep, RunView, StepCommitted
from trainctl.protocol.messages.trainer import FileDigest


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


class RunRates(msgspec.Struct, frozen=True):
    """How fast a run is, and how long it still takes; None is not known."""

    unit: str  # of the average: "tokens/s", or "pairs/s" where the loss is divided by pairs
    average_per_second: float | None = None  # since the run began, pauses excluded
    steps_per_second: float | None = None
    samples_per_second: float | None = None
    seconds_per_sample: float | None = None
    seconds_per_epoch: float | None = None
    epochs_left: float | None = None  # until the last step
    seconds_left: float | None = None  # until the last step, while the run is under way


class RunSummary(msgspec.Struct, frozen=True):
    """One line of `trainctl ls`."""

    run: Name
    name: str
    state: RunState
    step: Count
    steps: Count | None  # total; None: not known
    last_loss: float | None
    started_at: float
    directory: str
    lead: str = ""  # node that conducts it, or did last
    nodes: tuple[str, ...] = ()  # of its ranks
    last_step_at: float | None = None  # when the last step was committed
    stale: bool = False  # another node leads it and is out of reach: this is how it was when that took it over
    kind: RunKind = "hosted"
    rates: RunRates | None = None  # by its last step


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
    runs: tuple[RunSummary, ...] = ()  # all that are live on this agent, the hosted one first


class History(Reply, tag="history", frozen=True):
    series: tuple[Series, ...]
    own_metrics: tuple[str, ...] = ()  # all that the run brought and `METRICS` doesn't have, by name
    values_from: Count = 0  # first step whose metrics by name are kept one by one, and not only in larger buckets


class GapFill(Reply, tag="gap-fill", frozen=True):
    """`complete` is False when some are no longer kept: attach again."""

    complete: bool
    messages: tuple[Live, ...]


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


class Hosts(Reply, tag="hosts", frozen=True):
    run: str | None
    readings: tuple[HostReading, ...]  # those of this program's version, one every 10 s and node, for a week
    last_row: Count  # of the last one looked at
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
    """Something that was refused for lack of a right, as often as `count` says."""

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


class RunKept(Reply, tag="run-kept", frozen=True):
    """How far an attached run is recorded; the program sends the steps after that, again if need be."""

    run: str
    step: Count  # the newest recorded; 0: none
    directory: str  # where the agent keeps the run


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
    Snapshot | History | GapFill | Runs | Events | Steps | Hosts | LogPart | Viewers | Facts | Digests | Audit | RunKept
    | CommandReply | Refusal
)  # fmt: skip
