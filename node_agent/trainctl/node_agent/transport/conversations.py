"""Numbered conversations between two agents, without sockets, so that losses, repeats and restarts are tested.

Both ends number what they send from 1. A ping or beat has no number of its own: it carries the last one given out, so
that the loss of the newest message shows too. A side that misses a number ends the conversation, and the lead begins
another under a new name; what the old one lost is asked for again by a fence.
"""

import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import msgspec

from trainctl.protocol import messages

SILENT_AFTER_SECONDS = 3.5
"""Seconds of silence after which a follower's agent counts as silent; it answers a ping each second."""
STALE_SECONDS = 2.5
"""Seconds of silence after which an order may reach a follower's agent much later, as when its machine sleeps."""

Judgement = Literal["take", "drop", "gap", "stranger"]
Order = (
    messages.PeerHost
    | messages.PeerRelay
    | messages.PeerEnd
    | messages.PeerTrainer
    | messages.PeerKeep
    | messages.PeerClaim
)
Spoken = (
    Order
    | messages.PeerHosted
    | messages.PeerConsent
    | messages.PeerAnswer
    | messages.PeerExit
    | messages.PeerPing
    | messages.PeerBeat
)
"""Messages that are numbered, or name the number of the one before them."""
Say = Callable[[bytes, messages.FromPeer], Awaitable[None]]
"""Sends a message to the address of a lead's socket; a lead that has gone misses it and notices by the numbers."""
RefusalCode = Literal["unknown-link", "older-term", "busy"]
Sent = TypeVar("Sent", bound=messages.Message)


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
        if isinstance(message, messages.PeerPing | messages.PeerBeat):
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
        self.welcome: messages.PeerWelcome | None = None  # the newest
        self.numbers = Numbers("")
        self._heard = 0.0

    def begin(self, link: str, now: float) -> None:
        """A hello goes out under a new name; nothing of an older conversation counts any more."""
        self.numbers, self.open, self._heard = Numbers(link), False, now

    def take(self, message: messages.FromPeer, now: float) -> Literal["welcome", "take", "drop", "begin-again"]:
        """Return what to do with a message: `begin-again`: the conversation is over, and another is to begin."""
        if message.link != self.numbers.link:
            return "drop"  # of a conversation that is over
        if isinstance(message, messages.PeerRefusal):
            self.open = False
            if message.code != "unknown-link":
                self.state, self.why = "silent", message.text
            return "begin-again"
        if isinstance(message, messages.PeerWelcome):
            if self.open:
                return "drop"
            self.open, self._heard, self.welcome = True, now, message
            self.state, self.why = "connected", ""
            return "welcome"
        if not self.open:
            return "drop"
        judgement = self.numbers.judge(message)
        if judgement == "gap":
            self.open = False
            return "begin-again"
        self._heard = now
        return "take" if judgement == "take" else "drop"

    def is_overdue(self, now: float) -> bool:
        """Return whether it has been silent for too long, to a hello or to pings."""
        return now - self._heard > SILENT_AFTER_SECONDS

    def is_stale(self, now: float) -> bool:
        """Return whether what is sent now may be read long after it was meant."""
        return not self.open or now - self._heard > STALE_SECONDS

    def lose(self, why: str) -> None:
        """It can't be reached."""
        self.open, self.state, self.why = False, "silent" if self.welcome is not None else "unknown", why


@dataclasses.dataclass
class _InboundLink:
    identity: bytes
    numbers: Numbers
    address: str


class InboundLinks:
    """The follower's end: a conversation with each lead that has begun one, its newest."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._links: dict[str, _InboundLink] = {}  # by the lead's node
        self._heard_monotonic: dict[str, float] = {}  # likewise; outlives a conversation that was lost

    def address(self, lead: str) -> str:
        """Return the address at which a lead takes requests, empty if it hasn't greeted this agent."""
        return self._links[lead].address if lead in self._links else ""

    def lead_of(self, link: str) -> str | None:
        """Return the lead whose conversation a link is; None if it is no current one."""
        return next((lead for lead, talk in self._links.items() if talk.numbers.link == link), None)

    def heard_monotonic(self, lead: str) -> float:
        """Return the time of a lead's last message, in whichever conversation; 0 if it never sent one."""
        return self._heard_monotonic.get(lead, 0.0)

    async def greet(self, identity: bytes, hello: messages.PeerHello, welcome: messages.PeerWelcome) -> None:
        """A new conversation in place of an older one with the same lead."""
        self._links[hello.lead] = _InboundLink(identity, Numbers(hello.link), hello.address)
        self._heard_monotonic[hello.lead] = time.monotonic()
        await self._say(identity, welcome)

    async def judge(self, identity: bytes, message: Order | messages.PeerPing) -> str | None:
        """The lead whose message is to be taken; None for one that is dropped, or refused because one is missing."""
        lead = self.lead_of(message.link)
        if lead is None:
            await self.refuse(identity, message.link, "unknown-link", "this agent does not know this link")
            return None
        talk = self._links[lead]
        self._heard_monotonic[lead] = time.monotonic()
        judgement = talk.numbers.judge(message)
        if judgement == "gap":
            del self._links[lead]
            await self.refuse(identity, message.link, "unknown-link", "a message was lost")
        if judgement != "take":
            return None
        talk.identity = identity
        return lead

    async def beat(self, lead: str, beat: messages.PeerBeat) -> None:
        """Answer a ping; its link and number are given to the beat here."""
        talk = self._links[lead]
        numbered = msgspec.structs.replace(beat, link=talk.numbers.link, seq=talk.numbers.sent)
        await self._say(talk.identity, numbered)

    async def answer(self, lead: str, message: messages.FromPeer) -> bool:
        """Say something in the conversation with a lead, which gives it link and number; False if there is none."""
        talk = self._links.get(lead)
        if talk is None:
            return False
        await self._say(talk.identity, talk.numbers.stamped(message))
        return True

    async def object(self, lead: str, code: RefusalCode, text: str) -> None:
        """Refuse what a lead has ordered, and with it the conversation."""
        talk = self._links.get(lead)
        if talk is not None:
            await self.refuse(talk.identity, talk.numbers.link, code, text)

    async def refuse(self, identity: bytes, link: str, code: RefusalCode, text: str, **about: Any) -> None:
        await self._say(identity, messages.PeerRefusal(link=link, code=code, text=text, **about))
