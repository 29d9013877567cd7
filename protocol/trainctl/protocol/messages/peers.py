"""Messages between the lead's agent and a follower's, and the steps of guests."""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from trainctl.protocol.messages.base import MAX_COUNT, Count, Generation, Message, Name, RunState, Severity, Values
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.messages.telemetry import HostReading
from trainctl.protocol.messages.trainer import DeviceTypes, FromTrainer, Phases, ToTrainer


class HostedRank(msgspec.Struct, frozen=True):
    """A rank that a follower hosts."""

    run: Name
    rank: Count
    pid: Count | None  # trainer's process ID; None: it is starting, or has ended
    step: Count = 0  # newest committed step in the node's record
    generation: Generation | None = None  # generation of that step
    event: Count = 0  # ID of the newest event in that record
    seq: Count = 0  # number of the newest plan in that record


class LateEvent(msgspec.Struct, frozen=True):
    """An event of a run, usually an ended one, on a node that didn't lead it. The node that did writes it into the
    run's record, once."""

    run: Name
    at: float  # time in Unix seconds
    by: str  # who caused it, as in Event
    severity: Severity
    step: Count
    data: RunBranched  # what happened; its branch identifies the event


class PeerHello(Message, tag="peer-hello", frozen=True):
    """Starts a conversation, identified by `link`. Both sides number their messages from 1; a gap ends it."""

    link: Name
    lead: str  # node name of the lead
    address: str  # address for requests to the lead
    generation: Generation | None = None  # newest that the lead knows; a follower refuses an older term
    run: str | None = None  # ID of the run that it leads


class PeerHost(Message, tag="peer-host", frozen=True):
    """Host a rank: check the run file on this machine, create the run directory and start the trainer."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    config: dict[str, Any]  # parsed run file
    generation: Generation
    resume_step: Count | None = None  # step of this node's checkpoint to start from; None: none


class PeerRelay(Message, tag="peer-relay", frozen=True):
    """Forward a message to a rank's trainer; journal plans first."""

    link: Name
    seq: Count
    rank: Count
    order: ToTrainer


class PeerEnd(Message, tag="peer-end", frozen=True):
    """The run has ended, or the rank isn't needed: end its trainer if it is still running."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    state: RunState
    reason: str = ""


class PeerTrainer(Message, tag="peer-trainer", frozen=True):
    """Start a rank's trainer if it isn't running, or kill it because it hangs."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    wish: Literal["start", "kill"]


class PeerKeep(Message, tag="peer-keep", frozen=True):
    """Items from the lead's record of the run. The follower records them too, so that it can become the lead."""

    link: Name
    seq: Count
    run: Name
    items: tuple[bytes, ...]  # messages kept by followers, as msgpack, in the lead's order


class PeerClaim(Message, tag="peer-claim", frozen=True):
    """The sender asks for consent to lead the run in this term. The answer is PeerConsent.

    The lead hands the run over; any other agent consents to one claimant per term. A claim in term 0 is only a query:
    the answer is always a refusal that contains what that agent knows.
    """

    link: Name
    seq: Count
    run: Name
    term: Count
    hosted: HostedRank  # the claimant's newest record entries
    resume: bool = False  # resume an ended run; nodes that still take part in it refuse


class PeerPing(Message, tag="peer-ping", frozen=True):
    """Sent once per second. The answer is PeerBeat."""

    link: Name
    seq: Count  # sequence number of the last message sent, so that the receiver detects lost ones
    sent_monotonic: float = 0.0  # sender's monotonic clock; the answer repeats it
    round_trip_seconds: float | None = None  # round trip of the last answered ping
    yields: bool = False  # whether the receiver is to lead the run, because the lead's node is leaving
    taken: tuple[Name, ...] = ()  # branches of the events in the last answer that needn't be repeated


ToPeer = PeerHello | PeerHost | PeerRelay | PeerEnd | PeerTrainer | PeerKeep | PeerClaim | PeerPing


class PeerWelcome(Message, tag="peer-welcome", frozen=True):
    """Answer to PeerHello: the conversation has started."""

    link: Name
    node: str
    boot: str
    live_address: str  # address where it publishes
    version: str  # trainctl version
    generation: Generation | None = None  # newest generation that it has seen
    ranks: tuple[HostedRank, ...] = ()
    devices: tuple[DeviceTypes, ...] = ()  # devices that it can compute on, each backend's default first
    leaving: str = ""  # why its ranks must leave the group, such as a shutdown; empty: they needn't
    machine: str = ""  # identifies the processors that its ranks may use: equal for agents that share them
    cores: float = 0.0  # how many of them; 0: unknown
    threads: int = 0  # that its environment's OMP_NUM_THREADS sets; 0: any number


class PeerHosted(Message, tag="peer-hosted", frozen=True):
    """Answer to PeerHost: whether the trainer was started."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    field: str = ""  # invalid field; empty: the trainer was started
    problem: str = ""
    hosted: HostedRank | None = None  # the node's newest record entries


class PeerConsent(Message, tag="peer-consent", frozen=True):
    """Answer to PeerClaim: consent or refusal."""

    link: Name
    seq: Count
    run: Name
    term: Count  # claimed term; in a refusal, the newest term seen or promised
    refusal: str = ""  # reason for the refusal; empty: consent
    hosted: HostedRank | None = None  # this node's newest record entries; None: no record
    items: tuple[bytes, ...] = ()  # record items that the claimant lacks, as in PeerKeep
    takes_part: bool = False  # refusal: this node takes part in an active run
    checkpoint: Count = 0  # claim in term 0: step of this node's newest complete checkpoint of the run; 0: none
    checkpoint_generation: Generation | None = None  # generation that committed that step
    checkpoint_cursor: Count | None = None  # first position after that step


class PeerAnswer(Message, tag="peer-answer", frozen=True):
    """Forwards a message from a trainer."""

    link: Name
    seq: Count
    answer: FromTrainer
    returned: bool = False  # whether the trainer uses a new connection


class PeerExit(Message, tag="peer-exit", frozen=True):
    """A trainer's process has ended."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    clean: bool
    why: str
    memory: str = ""  # evidence that it ran out of memory; empty: none


class PeerBeat(Message, tag="peer-beat", frozen=True):
    """Answer to PeerPing."""

    link: Name
    seq: Count  # sequence number of the last message sent, so that the receiver detects lost ones
    ranks: tuple[HostedRank, ...] = ()
    loop_lag_seconds: float = 0.0
    host: HostReading | None = None  # newest reading of its machine
    sent_monotonic: float = 0.0  # value from the ping
    leaving: str = ""  # why its ranks must leave the group, such as a shutdown; empty: they needn't
    slept_seconds: float = 0.0  # how long its machine slept the last time; 0: it hasn't since the agent started
    woke_at: float = 0.0  # when that sleep ended
    late: tuple[LateEvent, ...] = ()  # events of runs that the receiver led, each until a ping has its branch


class PeerRefusal(Message, tag="peer-refusal", frozen=True):
    """The agent doesn't know the conversation, follows a different lead, or can't carry out the request."""

    link: Name
    code: Literal["unknown-link", "older-term", "busy", "not-authorised"]
    text: str
    run: str | None = None  # older-term: ID of the run that the lead named
    state: RunState | None = None  # state of that run; None: unknown
    reason: str = ""  # reason for that state


FromPeer = PeerWelcome | PeerHosted | PeerConsent | PeerAnswer | PeerExit | PeerBeat | PeerRefusal


MAX_GUEST_RANKS = 64
"""Maximum number of ranks in one attached run. A step with all their metrics must fit into one request."""


class GuestRank(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank of an attached run."""

    rank: Count
    node: Annotated[str, Meta(max_length=64)] = ""  # node of the rank; empty: the agent's node
    micro_batch: Count | None = None
    backend: Annotated[str, Meta(max_length=64)] | None = None
    device: Annotated[str, Meta(max_length=64)] | None = None
    pid: Count | None = None


class GuestPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One rank's part of a step of an attached run."""

    rank: Count
    tokens: Annotated[float, Meta(ge=0)] | None = 0.0  # tokens processed, without padding; 0 or None: unknown
    weight: Annotated[float, Meta(ge=0)] | None = None  # total weight of its samples
    samples: Count | None = 0  # number of samples that the rank processed; 0 or None: unknown
    micro_batch: Count | None = None
    step_seconds: Annotated[float, Meta(ge=0)] = 0.0
    phases: Phases = Phases()
    values: Values = msgspec.field(default_factory=dict)  # the rank's metrics, by name


class GuestStep(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One step of an attached run. Values that the program doesn't know are None. Losses and metrics may be NaN."""

    step: Annotated[int, Meta(ge=1, le=MAX_COUNT)]
    committed_at: float  # commit time, in Unix seconds
    step_seconds: Annotated[float, Meta(ge=0)]  # time since the previous step, excluding pauses
    samples: Count | None = 0  # samples in the step, across all ranks; 0 or None: unknown
    tokens: Count | None = None  # tokens processed by all ranks; 0 or None: unknown
    weight: Annotated[float, Meta(ge=0)] | None = None  # weight that divides the loss, in the run's `weight_unit`
    loss: float | None = None  # mean loss per unit of weight
    learning_rate: float | None = None
    grad_norm: float | None = None  # gradient norm before clipping
    global_batch: Count | None = None
    values: Values = msgspec.field(default_factory=dict)  # metrics of the run, by name
    parts: Annotated[tuple[GuestPart, ...], Meta(max_length=MAX_GUEST_RANKS)] = ()
