"""The conversations that other nodes' agents have begun with this one: each lead has at most one, its newest."""

import dataclasses
import time
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec

from trainctl.node_agent.transport.sequencing import Numbers, Order
from trainctl.protocol import messages as m

Say = Callable[[bytes, m.FromPeer], Awaitable[None]]
"""Sends a message to the address of a lead's socket; a lead that has gone misses it and notices by the numbers."""
RefusalCode = Literal["unknown-link", "older-term", "busy"]


@dataclasses.dataclass
class _InboundLink:
    identity: bytes
    numbers: Numbers
    address: str


class InboundLinks:
    """Judges what leads say by its numbers, and numbers what is sent to them."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self._links: dict[str, _InboundLink] = {}  # by the lead's node
        self._heard_monotonic: dict[str, float] = {}  # likewise; outlives a conversation that was lost

    def address(self, lead: str) -> str | None:
        """Where a lead takes requests, None if it hasn't greeted this agent."""
        return self._links[lead].address if lead in self._links else None

    def lead_of(self, link: str) -> str | None:
        """Whose conversation it is, None if none of now."""
        return next((lead for lead, talk in self._links.items() if talk.numbers.link == link), None)

    def is_current(self, lead: str, link: str) -> bool:
        """Return whether it is the conversation with this lead, not one before it."""
        return lead in self._links and self._links[lead].numbers.link == link

    def heard_monotonic(self, lead: str) -> float:
        """When a lead last said something, in whichever conversation; 0 if it never did."""
        return self._heard_monotonic.get(lead, 0.0)

    async def greet(self, identity: bytes, hello: m.PeerHello, welcome: m.PeerWelcome) -> None:
        """A new conversation in place of an older one with the same lead."""
        self._links[hello.lead] = _InboundLink(identity, Numbers(hello.link), hello.address)
        self._heard_monotonic[hello.lead] = time.monotonic()
        await self._send(identity, welcome)

    async def judge(self, identity: bytes, message: Order | m.PeerPing) -> str | None:
        """The lead whose message is to be taken; None for one that is dropped, or refused because one is missing."""
        found = [(lead, talk) for lead, talk in self._links.items() if talk.numbers.link == message.link]
        if not found:
            await self.refuse(identity, message.link, "unknown-link", "this agent does not know this link")
            return None
        lead, talk = found[0]
        self._heard_monotonic[lead] = time.monotonic()
        judgement = talk.numbers.judge(message)
        if judgement == "gap":
            del self._links[lead]
            await self.refuse(identity, message.link, "unknown-link", "a message was lost")
        if judgement != "take":
            return None
        talk.identity = identity
        return lead

    async def beat(self, lead: str, beat: m.PeerBeat) -> None:
        """Answer a ping; its link and number are given to the beat here."""
        talk = self._links[lead]
        numbered = msgspec.structs.replace(beat, link=talk.numbers.link, seq=talk.numbers.sent)
        await self._send(talk.identity, numbered)

    async def answer(self, lead: str, message: m.FromPeer) -> bool:
        """Say something in the conversation with a lead, which gives it link and number; False if there is none."""
        talk = self._links.get(lead)
        if talk is None:
            return False
        await self._send(talk.identity, talk.numbers.stamped(message))
        return True

    async def object(self, lead: str, code: RefusalCode, text: str) -> None:
        """Refuse what a lead has ordered, and with it the conversation."""
        talk = self._links.get(lead)
        if talk is not None:
            await self.refuse(talk.identity, talk.numbers.link, code, text)

    async def refuse(self, identity: bytes, link: str, code: RefusalCode, text: str, **about: Any) -> None:
        await self._send(identity, m.PeerRefusal(link=link, code=code, text=text, **about))

    async def _send(self, identity: bytes, message: m.FromPeer) -> None:
        assert message.link, "use answer(): it names the link"
        await self._say(identity, message)
