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
    pid: Count | None  # None: it is starting, or has ended
    step: Count = 0  # newest committed step in its node's record
    generation: Generation | None = None  # generation of that step
    event: Count = 0  # id of the newest event in that record
    seq: Count = 0  # number of the newest plan in that record


class PeerHello(Message, tag="peer-hello", frozen=True):
    """Begins a conversation, named by `link`. Both sides number what they send from 1; a gap ends the conversation."""

    link: Name
    lead: str  # name of the lead's node
    address: str  # where the lead takes requests
    generation: Generation | None = None  # newest that the lead knows; a follower that knows a newer term refuses
    run: str | None = None  # the run that it leads


class PeerHost(Message, tag="peer-host", frozen=True):
    """Host a rank: check the run file against this machine, make the run directory, start the trainer."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    config: dict[str, Any]  # the run file as parsed
    generation: Generation
    resume_step: Count | None = None  # step of the checkpoint on this node that the rank begins with; None: none


class PeerRelay(Message, tag="peer-relay", frozen=True):
    """Pass an order on to a rank's trainer; a plan is journaled first."""

    link: Name
    seq: Count
    rank: Count
    order: ToTrainer


class PeerEnd(Message, tag="peer-end", frozen=True):
    """The run has ended, or the rank is not wanted: end its trainer if it still lives."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    state: RunState
    reason: str = ""


class PeerTrainer(Message, tag="peer-trainer", frozen=True):
    """Restart the trainer of a rank if it is not running, or kill it because it hangs."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    wish: Literal["start", "kill"]


class PeerKeep(Message, tag="peer-keep", frozen=True):
    """What the lead has recorded of the run. The follower records it too, so that it could lead the run itself."""

    link: Name
    seq: Count
    run: Name
    items: tuple[bytes, ...]  # each the msgpack of a message kept by followers, in the lead's order


class PeerClaim(Message, tag="peer-claim", frozen=True):
    """The sender will lead the run in this term, if it gets consent; answered by PeerConsent.

    The lead hands the run over; any other agent consents to one claimant per term. A claim in term 0 only asks: the
    answer is always a refusal, and says what is known there.
    """

    link: Name
    seq: Count
    run: Name
    term: Count
    hosted: HostedRank  # how far the claimant's record goes
    resume: bool = False  # resume a run that has ended: a node that takes part in it refuses


class PeerPing(Message, tag="peer-ping", frozen=True):
    """Sent at 1 Hz; answered by PeerBeat."""

    link: Name
    seq: Count  # last number sent, so that a lost message shows
    sent_monotonic: float = 0.0  # by the sender's clock; the answer repeats it
    round_trip_seconds: float | None = None  # of the last answered ping of this conversation


ToPeer = PeerHello | PeerHost | PeerRelay | PeerEnd | PeerTrainer | PeerKeep | PeerClaim | PeerPing


class PeerWelcome(Message, tag="peer-welcome", frozen=True):
    """Answer to PeerHello: the conversation has begun."""

    link: Name
    node: str
    boot: str
    live_address: str  # where it publishes
    version: str  # version of the program
    generation: Generation | None = None  # newest that it has seen
    ranks: tuple[HostedRank, ...] = ()


class PeerHosted(Message, tag="peer-hosted", frozen=True):
    """Answer to PeerHost."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    field: str = ""  # what is at fault; empty: the trainer was started
    problem: str = ""
    hosted: HostedRank | None = None  # how far that node's record goes


class PeerConsent(Message, tag="peer-consent", frozen=True):
    """Answer to PeerClaim."""

    link: Name
    seq: Count
    run: Name
    term: Count  # the claimed one; in a refusal, the newest that was seen or promised
    refusal: str = ""  # why not; empty: it consents
    hosted: HostedRank | None = None  # how far this node's record of the run goes; None: it has none
    items: tuple[bytes, ...] = ()  # what its record has beyond the claimant's, as in PeerKeep
    takes_part: bool = False  # in a refusal: this node takes part in an active run


class PeerAnswer(Message, tag="peer-answer", frozen=True):
    """Passes on what a trainer sent."""

    link: Name
    seq: Count
    answer: FromTrainer
    returned: bool = False  # the trainer speaks over a new connection


class PeerExit(Message, tag="peer-exit", frozen=True):
    """A trainer's process has ended."""

    link: Name
    seq: Count
    run: Name
    rank: Count
    clean: bool
    why: str
    memory: str = ""  # what shows that it ran out of memory; empty: nothing does


class PeerBeat(Message, tag="peer-beat", frozen=True):
    """Answer to PeerPing."""

    link: Name
    seq: Count  # last number sent
    ranks: tuple[HostedRank, ...] = ()
    loop_lag_seconds: float = 0.0
    host: HostReading | None = None  # the newest reading of its machine
    sent_monotonic: float = 0.0  # as in the ping


class PeerRefusal(Message, tag="peer-refusal", frozen=True):
    """The agent doesn't know the conversation, follows another lead, or can't obey."""

    link: Name
    code: Literal["unknown-link", "older-term", "busy", "not-authorised"]
    text: str
    run: str | None = None  # older-term: the run that the lead named
    state: RunState | None = None  # state of that run as known here; None: not known
    reason: str = ""  # why it is in that state


FromPeer = PeerWelcome | PeerHosted | PeerConsent | PeerAnswer | PeerExit | PeerBeat | PeerRefusal
