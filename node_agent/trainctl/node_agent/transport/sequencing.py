"""A numbered conversation between two agents: pure, so that losses, repeats and restarts are tested without sockets.

Both ends number what they send from 1. A ping or beat has no number of its own: it carries the last one given out, so
that the loss of the newest message shows too. A side that misses a number ends the conversation, and the lead begins
another under a new name; what the old one lost is asked for again by a fence.
"""

from typing import Literal, TypeVar

import msgspec

from trainctl.protocol.messages import (
    FromPeer,
    Message,
    PeerAnswer,
    PeerBeat,
    PeerClaim,
    PeerConsent,
    PeerEnd,
    PeerExit,
    PeerHost,
    PeerHosted,
    PeerKeep,
    PeerPing,
    PeerRefusal,
    PeerRelay,
    PeerTrainer,
    PeerWelcome,
)

SILENT_AFTER_SECONDS = 3.5
"""Seconds of silence after which a follower's agent counts as silent; it answers a ping each second."""
STALE_SECONDS = 2.5
"""Seconds of silence after which an order may reach a follower's agent much later, as when its machine sleeps."""

Judgement = Literal["take", "drop", "gap", "stranger"]
Order = PeerHost | PeerRelay | PeerEnd | PeerTrainer | PeerKeep | PeerClaim
Spoken = Order | PeerHosted | PeerConsent | PeerAnswer | PeerExit | PeerPing | PeerBeat
"""Messages that are numbered, or name the number of the one before them."""


Sent = TypeVar("Sent", bound=Message)


class Numbers:
    """One end's count of what it sent and what it received in the conversation named `link`."""

    def __init__(self, link: str) -> None:
        self.link, self.sent, self.received = link, 0, 0

    def stamped(self, message: Sent) -> Sent:
        """A message that is sent now, with the conversation's name and its number in it."""
        self.sent += 1
        return msgspec.structs.replace(message, link=self.link, seq=self.sent)

    def judge(self, message: Spoken) -> Judgement:
        """Return what to do with a message: take it, drop a repeat, or end the conversation because one before it is
        lost."""
        if message.link != self.link:
            return "stranger"
        if isinstance(message, PeerPing | PeerBeat):
            return "take" if message.seq <= self.received else "gap"
        if message.seq <= self.received:
            return "drop"
        if message.seq > self.received + 1:
            return "gap"
        self.received = message.seq
        return "take"


class Line:
    """The lead's end: whether the follower's agent is connected, and when the conversation is to begin again.

    `now` is a reading of a monotonic clock, in seconds.
    """

    def __init__(self) -> None:
        self.state: Literal["unknown", "connected", "silent"] = "unknown"
        self.why = "not reached yet"
        self.open = False
        self.welcome: PeerWelcome | None = None  # the newest
        self.numbers = Numbers("")
        self._heard = 0.0

    def begin(self, link: str, now: float) -> None:
        """A hello goes out under a new name; nothing of an older conversation counts any more."""
        self.numbers, self.open, self._heard = Numbers(link), False, now

    def take(self, message: FromPeer, now: float) -> Literal["welcome", "take", "drop", "begin-again"]:
        """Return what to do with a message: `begin-again`: the conversation is over, and another is to begin."""
        if message.link != self.numbers.link:
            return "drop"  # of a conversation that is over
        if isinstance(message, PeerRefusal):
            self.open = False
            if message.code != "unknown-link":
                self.state, self.why = "silent", message.text
            return "begin-again"
        if isinstance(message, PeerWelcome):
            return self._welcomed(message, now)
        if not self.open:
            return "drop"
        judgement = self.numbers.judge(message)
        if judgement == "gap":
            self.open = False
            return "begin-again"
        self._heard = now
        return "take" if judgement == "take" else "drop"

    def _welcomed(self, message: PeerWelcome, now: float) -> Literal["welcome", "drop"]:
        if self.open:
            return "drop"
        self.open, self._heard, self.welcome = True, now, message
        self.state, self.why = "connected", ""
        return "welcome"

    def is_overdue(self, now: float) -> bool:
        """Return whether it has been silent for too long, to a hello or to pings."""
        return now - self._heard > SILENT_AFTER_SECONDS

    def is_stale(self, now: float) -> bool:
        """Return whether what is sent now may be read long after it was meant."""
        return not self.open or now - self._heard > STALE_SECONDS

    def lose(self, why: str) -> None:
        """It can't be reached."""
        self.open, self.state, self.why = False, "silent" if self.welcome is not None else "unknown", why
