"""Election of a lead for a new term: by the old lead's consent, a majority's, or an operator's word."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Protocol

import msgspec

from trainctl.node_agent.planning.durable import next_term
from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.records.replication import EndedRun, beyond, far
from trainctl.node_agent.roles.rank_hosting import NO_RANK
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages
from trainctl.protocol.errors import InvalidInputError, ProtocolError, RefusedError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec

CLAIM_SECONDS = 5.0
"""Seconds another node's agent may take to answer a claim."""
TRIES = 3
"""Terms that are claimed in a row, each above all that the refusals name."""
HandOver = Callable[[str, str, int], Awaitable[None]]
"""Follows the claimant at an address, which leads this agent's run in a term from then on. Raises RefusedError."""


class Copy(Protocol):
    """This node's record of the run that is claimed."""

    @property
    def run(self) -> str: ...
    @property
    def hosted(self) -> messages.HostedRank: ...
    def keep(self, items: Sequence[bytes]) -> list[messages.KeptCommand]: ...


class Claim:
    """One run that this node is to lead in place of `lead`; `resume`: it has ended, and is resumed.

    `check` raises InvalidInputError where what was so when the claim was begun isn't any more.
    """

    def __init__(
        self,
        context: AgentContext,
        peers: Peers,
        copy: Copy,
        lead: str,
        check: Callable[[], None] = lambda: None,
        *,
        resume: bool = False,
    ) -> None:
        self._context, self._peers = context, peers
        self._copy, self._lead, self._check, self._resume = copy, lead, check, resume

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
            self._check()
            said = [answer for answer in answers.values() if answer is not None]
            why = self._shortfall(answers)
            refusals = [answer for answer in said if answer.refusal]
            for refusal in refusals:
                if refusal.hosted and far(refusal.hosted) > far(hosted):
                    raise InvalidInputError("node", refusal.refusal)
            if any(refusal.term >= term for refusal in refusals):  # newer, or another claimant's
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
        self._check()
        if asked == [self._lead] and answers[self._lead] is None:
            if self._is_lead_open:
                raise self._no_answer()
            await self._ask_first(old_lead_is_off)  # it has become unreachable meanwhile: of the others
            return
        for node, answer in answers.items():
            if answer is not None and answer.takes_part and self._resume:
                raise InvalidInputError("resume", f"{node} cannot agree: {answer.refusal}")
        as_if = {node: answer and self._without_term(answer) for node, answer in answers.items()}
        if not (old_lead_is_off or self._is_lead_open) and (why := self._shortfall(as_if)):
            raise InvalidInputError("node", why)
        for term in [answer.term for answer in answers.values() if answer is not None]:
            self._context.db.saw(messages.Generation(term, 0))

    def _without_term(self, answer: messages.PeerConsent) -> messages.PeerConsent:
        """Return an answer as it would be to a term that can be consented to; a node in another run refuses any."""
        hosted = answer.hosted
        if answer.takes_part and (hosted is None or hosted.run != self._copy.run):
            return answer
        return msgspec.structs.replace(answer, refusal="")

    async def _handed_over(self) -> int | None:
        """The lead itself lets go, and no one else is asked; None if it has become unreachable meanwhile."""
        lead, term = self._lead, self._next(self._context.db.term)
        self._context.db.consent(term, self._context.node, self._copy.run)
        answer = (await self._ask(term, [lead]))[lead]
        self._check()
        if answer is None and not self._is_lead_open:
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

    def _take_from(self, answers: Sequence[messages.PeerConsent]) -> None:
        """Keep what the node whose record goes furthest has beyond this one's."""
        furthest = max(answers, key=lambda answer: far(answer.hosted) if answer.hosted else (0, 0, 0, 0), default=None)
        try:
            commands = self._copy.keep(furthest.items if furthest is not None else ())
        except ProtocolError as error:
            raise InvalidInputError("node", f"cannot copy the newer part of another node's record: {error}") from None
        for command in commands:
            self._context.db.keep_command(command)

    async def _ask(self, term: int, nodes: Collection[str]) -> dict[str, messages.PeerConsent | None]:
        hosted, links = self._copy.hosted, self._peers.links
        claims = (links[node].claim(term, hosted, CLAIM_SECONDS, resume=self._resume) for node in nodes)
        return dict(zip(nodes, await asyncio.gather(*claims), strict=True))

    def _shortfall(self, answers: dict[str, messages.PeerConsent | None]) -> str:
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


class Votes:
    """Judges claims by what this node takes part in, has consented to and has seen."""

    def __init__(self, context: AgentContext, role: AgentRole, hand_over: HandOver) -> None:
        self._context, self._node, self._db = context, context.node, context.db
        self._role, self._hand_over = role, hand_over

    def term_of(self, run: str | None) -> int:
        """The newest term of a run that this node knows of, 0 if of none."""
        if run is None:
            return 0
        followed, row = self._role.followed, self._db.known_run(run)
        if followed is not None and followed.run == run:
            kept = followed.generation.term
        else:
            kept = restore.kept_term(RunPaths(row.directory)) if row is not None else 0
        return max(kept, self._db.consented_term(run))

    async def answer(self, claimant: str, address: str, claim: messages.PeerClaim) -> messages.PeerConsent:
        """The answer to the claimant, whose agent takes requests at `address`; its link and number are still open."""
        takes_part = self._role.active_run is not None
        said = messages.PeerConsent(link="", seq=0, run=claim.run, term=claim.term, hosted=self._hosted)
        refusal, items = self._objection(claimant, claim), list[messages.Kept]()
        try:
            row = self._db.known_run(claim.run) if not claim.term else None
            if row is not None:
                here = await asyncio.to_thread(checkpoint_source.newest_here, RunPaths(row.directory))
                step, generation, cursor = here
                said = msgspec.structs.replace(
                    said, checkpoint=step, checkpoint_generation=generation, checkpoint_cursor=cursor
                )
            if not refusal and claim.resume:
                said, items, refusal = self._beyond_ended(claimant, address, claim, said)
            elif not refusal and self._role.run == claim.run:
                if (led := self._role.session) is not None:
                    own = messages.HostedRank(led.run, 0, None, *led.recorder.newest())
                    items += beyond(led.recorder, led.paths, own, claim.hosted)
                await self._hand_over(claimant, address, claim.term)
                items += [row for row in self._db.open_commands() if row.run == claim.run]
                said = msgspec.structs.replace(said, hosted=self._hosted)
            elif not refusal and self._role.followed is not None:
                items += self._role.followed.beyond(claim.hosted)
        except (InvalidInputError, RefusedError) as error:
            refusal, items = str(error), []
        if refusal:
            return msgspec.structs.replace(said, term=self._db.term, refusal=refusal, takes_part=takes_part)
        return msgspec.structs.replace(said, items=tuple(map(codec.encode, items)))

    @property
    def _hosted(self) -> messages.HostedRank | None:
        return self._role.followed.hosted if self._role.followed is not None else None

    def _objection(self, claimant: str, claim: messages.PeerClaim) -> str:
        """Return why this node doesn't consent; empty if it does, and then to no one else in that term."""
        active = self._role.active_run
        if claimant not in self._context.cluster.nodes:
            return f"{self._node} has no node {claimant} in its cluster"
        if active is not None and claim.resume:
            followed = self._role.followed
            lead = self._node if followed is None else followed.known.lead
            return f"{self._node} takes part in {active} (lead: {lead}), which has not ended"
        if active not in (None, claim.run):
            return f"{self._node} takes part in {active}"
        term = self.term_of(claim.run)
        if not claim.term or claim.term < term or claim.term == term != self._db.consented_term(claim.run):
            return f"{self._node} has seen term {term}"
        if self._db.may_have_forgotten_consent:
            return f"{self._node} lost its database just now, and may have agreed to another node; try again in 30 s"
        given = self._db.consent(claim.term, claimant, claim.run)
        return "" if given == claimant else f"{self._node} has agreed to {given}"

    def _beyond_ended(
        self, claimant: str, address: str, claim: messages.PeerClaim, said: messages.PeerConsent
    ) -> tuple[messages.PeerConsent, list[messages.Kept], str]:
        """Return what this node's record of a run that has ended has beyond the claimant's, or why that can't be told.
        If its own agent led the run it leads it no more. Raises InvalidInputError."""
        row = self._db.known_run(claim.run)
        if row is None:
            return said, [], ""
        known = self._db.followed(claim.run)
        if known is not None:
            rank = known.rank
        else:
            ranks = restore.kept_ranks(RunPaths(row.directory)).items()
            rank = next((rank for rank, node in ranks if node == self._node), NO_RANK)
        with EndedRun(row, rank if rank != NO_RANK else None) as ended:
            said = msgspec.structs.replace(said, hosted=ended.hosted)
            try:
                items = ended.beyond(claim.hosted)
            except RefusedError as error:
                return said, [], str(error)
        if known is None:
            self._db.follow(FollowedRun(claim.run, rank, claimant, address))
        return said, items, ""
