"""Election of a lead for a new term: with the old lead's consent, a majority's, or an operator's word."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import msgspec

from trainctl.node_agent.planning.durable import next_term
from trainctl.node_agent.records.replication import far
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, ProtocolError

CLAIM_SECONDS = 5.0
"""Seconds another node's agent may take to answer a claim."""
TRIES = 3
"""Terms that are claimed in a row, each above all that the refusals name."""


class Copy(Protocol):
    """This node's record of the run that is claimed."""

    @property
    def run(self) -> str: ...
    @property
    def hosted(self) -> m.HostedRank: ...
    def keep(self, items: Sequence[bytes]) -> list[m.KeptCommand]: ...


class Claim:
    """One run that this node is to lead in place of `lead`; `resume`: it has ended, and is resumed.

    `still` raises InvalidInputError where what was so when the claim was begun isn't any more.
    """

    def __init__(
        self,
        context: AgentContext,
        peers: Peers,
        copy: Copy,
        lead: str,
        still: Callable[[], None] = lambda: None,
        *,
        resume: bool = False,
    ) -> None:
        self._context, self._peers = context, peers
        self._copy, self._lead, self._still, self._resume = copy, lead, still, resume

    async def consented(self, old_lead_is_off: bool) -> int:
        """The term in which this node may lead the run. Raises InvalidInputError."""
        await self._ask_first(old_lead_is_off)
        if self._is_lead_open:
            handed_over = await self._handed_over()
            if handed_over is not None:
                return handed_over
        db, term, why = self._context.db, self._next(self._context.db.term), ""
        for _ in range(TRIES):
            if db.consent(term, self._context.node, self._copy.run) != self._context.node:
                term = self._next(max(term, db.term))
                continue
            hosted = self._copy.hosted
            answers = await self._ask(term, [node for node in self._peers.links if node != self._lead])
            self._still()
            said = [answer for answer in answers.values() if answer is not None]
            why = self._shortfall(answers)
            for answer in said:
                if answer.refusal and answer.hosted and far(answer.hosted) > far(hosted):
                    raise InvalidInputError("node", answer.refusal)
            if _is_outdated(said, term):
                term = self._next(max(answer.term for answer in said))
                continue
            if why and not old_lead_is_off:
                break
            self._take_from(said)
            return term
        raise InvalidInputError("node", why or "other nodes claim newer terms; try again in a moment")

    def _next(self, above: int) -> int:
        return next_term(above, self._context.node, self._peers.links)

    @property
    def _is_lead_open(self) -> bool:
        return self._peers.is_open(self._lead)

    async def _ask_first(self, old_lead_is_off: bool) -> None:
        """Ask whether the run can be led at all, and above which term: a consent that leads to nothing can't be taken
        back, and a node that has given one no longer obeys the old lead."""
        others = [node for node in self._peers.links if node != self._lead or self._is_lead_open]
        asked = [self._lead] if self._is_lead_open and not self._resume else others
        answers = await self._ask(0, asked)
        self._still()
        if asked == [self._lead] and answers[self._lead] is None:
            if self._is_lead_open:
                raise self._no_answer()
            await self._ask_first(old_lead_is_off)  # it has become unreachable meanwhile: of the others
            return
        for node, answer in answers.items():
            if answer is not None and answer.takes_part and self._resume:
                raise InvalidInputError("resume", f"{node} cannot agree: {answer.refusal}")
        as_if = {node: answer and msgspec.structs.replace(answer, refusal="") for node, answer in answers.items()}
        if not (old_lead_is_off or self._is_lead_open) and (why := self._shortfall(as_if)):
            raise InvalidInputError("node", why)
        for term in [answer.term for answer in answers.values() if answer is not None]:
            self._context.db.saw(m.Generation(term, 0))

    async def _handed_over(self) -> int | None:
        """The lead itself lets go, and no one else is asked; None if it has become unreachable meanwhile."""
        lead, term = self._lead, self._next(self._context.db.term)
        self._context.db.consent(term, self._context.node, self._copy.run)
        answer = (await self._ask(term, [lead]))[lead]
        self._still()
        if answer is None and not self._peers.links[lead].line.open:
            return None
        if answer is None:
            raise self._no_answer()
        if answer.refusal:
            raise InvalidInputError("node", f"{lead} refuses to hand over the run: {answer.refusal}")
        self._take_from([answer])
        return term

    def _no_answer(self) -> InvalidInputError:
        text = f"{self._lead} leads the run and is connected, but did not answer; try again in a moment"
        return InvalidInputError("node", text)

    def _take_from(self, answers: Sequence[m.PeerConsent]) -> None:
        """Keep what the node whose record goes furthest has beyond this one's."""
        furthest = max(answers, key=lambda answer: far(answer.hosted) if answer.hosted else (0, 0, 0, 0), default=None)
        try:
            commands = self._copy.keep(furthest.items if furthest is not None else ())
        except ProtocolError as error:
            raise InvalidInputError("node", f"cannot copy the newer part of another node's record: {error}") from None
        for command in commands:
            self._context.db.keep_command(command)

    async def _ask(self, term: int, nodes: Collection[str]) -> dict[str, m.PeerConsent | None]:
        hosted, links = self._copy.hosted, self._peers.links
        claims = (links[node].claim(term, hosted, CLAIM_SECONDS, resume=self._resume) for node in nodes)
        return dict(zip(nodes, await asyncio.gather(*claims), strict=True))

    def _shortfall(self, answers: dict[str, m.PeerConsent | None]) -> str:
        """Return what is missing for a majority of the cluster's nodes, empty if nothing is."""
        count = len(self._peers.links) + 1
        agree = 1 + sum(answer is not None and not answer.refusal for answer in answers.values())
        if 2 * agree > count:
            return ""
        said = [f"{self._lead} is unreachable"] if self._lead in self._peers.links else []
        said += [
            f"{node} {'does not answer' if answer is None else f'refuses: {answer.refusal}'}"
            for node, answer in answers.items()
            if answer is None or answer.refusal
        ]
        off = f"the machine of {self._lead} is" if self._lead in self._peers.links else "their machines are"
        return (
            f"{agree} of {count} nodes agree, but a majority is {count // 2 + 1}: {'; '.join(said)}; if {off} "
            "powered off, use --old-lead-is-off"
        )


def _is_outdated(answers: Sequence[m.PeerConsent], term: int) -> bool:
    """Return whether a refusal names a newer term, or another claimant in this one."""
    return any(answer.refusal and answer.term >= term for answer in answers)
