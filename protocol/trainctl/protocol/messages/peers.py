"""Messages between the lead's agent and a follower's."""

from typing import Any, Literal

import msgspec

from trainctl.protocol.messages.base import Count, Generation, Message, Name, RunState
from trainctl.protocol.messages.telemetry import HostReading
from trainctl.protocol.messages.trainer import FromTrainer, ToTrainer


class HostedRank(msgspec.Struct, frozen=True):
    """A rank that a follower hosts."""

    run: Name
    rank: Count
    pid: Count | None  # None: starting, or gone
    step: Count = 0  # newest committed step in its node's record
    generation: Generation | None = None  # that step's
    event: Count = 0  # id of the newest event there
    seq: Count = 0  # of the newest plan there


class PeerHello(Message, tag="peer-hello", frozen=True):
    """Begins a conversation, named by `link`: both sides number what they send from 1, and a gap ends it."""

    link: Name
    lead: str  # node
    address: str  # where the lead takes requests
    generation: Generation | None = None  # highest that the lead knows; a follower that knows a higher term refuses
    run: str | None = None  # the run it leads


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
    """What the lead has kept of the run: a follower keeps it too, so that it could lead the run itself."""

    link: Name
    seq: Count
    run: Name
    items: tuple[bytes, ...]  # each a message of `Kept` in msgpack, in the order in which the lead kept them


class PeerClaim(Message, tag="peer-claim", frozen=True):
    """Whoever says this is to lead the run in the term told; answered by PeerConsent.

    An agent that leads it hands it over; any other consents to one claimant a term. In term 0 it only asks: no one
    consents, and the refusal tells how it stands there.
    """

    link: Name
    seq: Count
    run: Name
    term: Count
    hosted: HostedRank  # how far the claimant's record goes
    resume: bool = False  # the run has ended and is to be resumed: refused by whoever takes part in it


class PeerPing(Message, tag="peer-ping", frozen=True):
    """Sent at 1 Hz; answered by PeerBeat."""

    link: Name
    seq: Count  # last number sent, so that a lost message is noticed
    sent_monotonic: float = 0.0  # by the sender's clock: the answer has it again
    round_trip_seconds: float | None = None  # of the last ping that was answered in this conversation


ToPeer = PeerHello | PeerHost | PeerRelay | PeerEnd | PeerTrainer | PeerKeep | PeerClaim | PeerPing


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
    memory: str = ""  # what says that it ran out of memory; empty: nothing does


class PeerBeat(Message, tag="peer-beat", frozen=True):
    """Answer to PeerPing."""

    link: Name
    seq: Count  # last number sent
    ranks: tuple[HostedRank, ...] = ()
    loop_lag_seconds: float = 0.0
    host: HostReading | None = None  # its machine's newest
    sent_monotonic: float = 0.0  # as in the ping


class PeerRefusal(Message, tag="peer-refusal", frozen=True):
    """The conversation is not known here, or this agent follows another lead."""

    link: Name
    code: Literal["unknown-link", "older-term", "busy", "not-authorised"]
    text: str
    run: str | None = None  # older-term: the one that the lead said it leads
    state: RunState | None = None  # that run's, as it is known here; None: not known
    reason: str = ""  # of that state


FromPeer = PeerWelcome | PeerHosted | PeerConsent | PeerAnswer | PeerExit | PeerBeat | PeerRefusal
