"""How this node comes to conduct a run that another one did: by that one's hand, a majority, or an operator's word."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from trainctl.node_agent import decisions as d
from trainctl.node_agent.copies import far
from trainctl.node_agent.equipment import Equipment
from trainctl.node_agent.followed import Followed
from trainctl.node_agent.launch import Launch
from trainctl.node_agent.ledger import FollowedRun, KnownRun
from trainctl.node_agent.peers import Peers
from trainctl.node_agent.session import DURABLE_KEY
from trainctl.protocol import messages as m
from trainctl.protocol import verbs
from trainctl.protocol.errors import InvalidInputError, ProtocolError

CLAIM_SECONDS = 5.0
"""How long another node's agent may take to answer a claim."""
LAG_STEPS = 8
"""So many steps may be planned and not known to be committed: what ranks repeat of their reports bridges them."""
TRIES = 3
"""Terms that are claimed in a row, each above all that the refusals tell of."""


class LetGo(NamedTuple):
    """A run that an agent conducts no more."""

    run: KnownRun
    rank: int | None  # this node's, None if it has none


class Following(Protocol):
    """The part of an agent that follows."""

    @property
    def followed(self) -> Followed | None: ...
    def release(self) -> tuple[KnownRun, FollowedRun]: ...
    def adopt(self, row: KnownRun, known: FollowedRun) -> None: ...


class Leading(Protocol):
    """The part of an agent that conducts."""

    peers: Peers
    launch: Launch

    @property
    def run(self) -> str | None: ...
    async def take_over(self, known: KnownRun, term: int, before: str) -> int: ...


class Succession:
    """Carries out `promote` on the node that it names."""

    def __init__(self, equipment: Equipment, leading: Leading, following: Following) -> None:
        self._own, self._leading, self._following = equipment, leading, following

    async def promote(self, command: m.Command, args: verbs.Promote) -> d.CommandEnded:
        """Conduct the run that is followed here. Raises InvalidInputError, and then nothing has changed but the terms
        that nodes have consented to."""
        followed = self._check(command)
        self._leading.launch.check_take_over(followed.paths)
        before = followed.known.lead
        term = await self._consented(followed, args.old_lead_is_off)
        step = await self._take_over(followed, term)
        self._own.ledger.set_run(command.id, followed.run)
        return d.CommandEnded(
            command.id, "applied", step, before=f"{before} conducts", after=f"{self._own.node} conducts, term {term}"
        )

    async def reclaim(self, term: int) -> None:
        """Conduct again a run that was handed over in `term`, for its claimant has not begun to."""
        followed = self._following.followed
        if followed is not None and followed.wanted is None and self._leading.run is None:
            with contextlib.suppress(InvalidInputError):
                await self._take_over(followed, term + 1)

    async def _take_over(self, followed: Followed, term: int) -> int:
        """Gives the step that the run stands at. Raises InvalidInputError, and follows it then as before."""
        row, known = self._following.release()
        try:
            step = await self._leading.take_over(row, term, known.lead)
        except InvalidInputError:
            self._following.adopt(row, known)
            raise
        self._own.ledger.unfollow(row.run)
        return step

    def _still(self, followed: Followed) -> None:
        """After some time: the run may have ended meanwhile."""
        if self._following.followed is not followed or followed.wanted is not None:
            raise InvalidInputError("node", f"{followed.run} has ended meanwhile")

    def _check(self, command: m.Command) -> Followed:
        node, followed = self._own.node, self._following.followed
        if command.node != node:
            raise InvalidInputError("node", f"no node {command.node!r} in this agent's cluster")
        if self._leading.run is not None:
            raise InvalidInputError("node", f"{node} conducts {self._leading.run} already")
        if followed is None or followed.wanted is not None:
            raise InvalidInputError("node", f"{node} has no rank of an active run, and so no record of one")
        if command.run is not None and command.run != followed.run:
            raise InvalidInputError("run", f"{node} has a rank of {followed.run}, not of {command.run}")
        if followed.recorder.meta(DURABLE_KEY) is None:
            raise InvalidInputError("node", f"{node} has not been given the run's record yet")
        known = followed.recorder.last_state()
        step, planned = known.step.step if known.step else 0, known.plan.step if known.plan else 0
        if planned > step + LAG_STEPS:
            text = f"{node}'s copy of the record is still being brought up to date: it has step {step:,} of {planned:,}"
            raise InvalidInputError("node", text)
        return followed

    # ------------------------------------------------------------ consent

    async def _consented(self, followed: Followed, old_lead_is_off: bool) -> int:
        """The term in which this node may conduct the run."""
        lead, link = followed.known.lead, self._leading.peers.links.get(followed.known.lead)
        if link is not None and link.line.open:
            handed_over = await self._handed_over(followed)
            if handed_over is not None:
                return handed_over
        term, why = self._own.ledger.term + 1, ""
        for _ in range(TRIES):
            if self._own.ledger.consent(term, self._own.node, followed.run) != self._own.node:
                term += 1
                continue
            hosted = followed.hosted
            answers = await self._ask(hosted, term, self._others(lead))
            self._still(followed)
            said = [answer for answer in answers.values() if answer is not None]
            why = self._shortfall(answers, lead)
            for answer in said:
                if answer.refusal and answer.hosted and far(answer.hosted) > far(hosted):
                    raise InvalidInputError("node", answer.refusal)
            if _is_outdated(said, term):
                term = max(answer.term for answer in said) + 1
                continue
            if why and not old_lead_is_off:
                break
            self._take_from(followed, said)
            return term
        raise InvalidInputError("node", why or "other nodes claim newer terms; try again in a moment")

    async def _handed_over(self, followed: Followed) -> int | None:
        """The lead itself lets go, and nobody else is asked; None if it has gone out of reach meanwhile."""
        lead, term = followed.known.lead, self._own.ledger.term + 1
        self._own.ledger.consent(term, self._own.node, followed.run)
        answer = (await self._ask(followed.hosted, term, [lead]))[lead]
        self._still(followed)
        if answer is None and not self._leading.peers.links[lead].line.open:
            return None
        if answer is None:
            text = f"{lead} conducts the run, is in touch, and did not answer; ask again in a moment"
            raise InvalidInputError("node", text)
        if answer.refusal:
            raise InvalidInputError("node", f"{lead} does not hand the run over: {answer.refusal}")
        self._take_from(followed, [answer])
        return term

    def _take_from(self, followed: Followed, answers: Sequence[m.PeerConsent]) -> None:
        """Keep what the node whose record goes furthest has beyond this one's."""
        furthest = max(answers, key=lambda answer: far(answer.hosted) if answer.hosted else (0, 0, 0, 0), default=None)
        try:
            commands = followed.keep(furthest.items if furthest is not None else ())
        except ProtocolError as error:
            raise InvalidInputError("node", f"what another node's record has beyond this one's: {error}") from None
        for command in commands:
            self._own.ledger.keep_command(command)

    def _others(self, lead: str) -> list[str]:
        return [node for node in self._leading.peers.links if node != lead]

    async def _ask(self, hosted: m.HostedRank, term: int, nodes: Collection[str]) -> dict[str, m.PeerConsent | None]:
        links = self._leading.peers.links
        answers = await asyncio.gather(*(links[node].claim(term, hosted, CLAIM_SECONDS) for node in nodes))
        return dict(zip(nodes, answers, strict=True))

    def _shortfall(self, answers: dict[str, m.PeerConsent | None], lead: str) -> str:
        """What is missing for a majority of the cluster's nodes, empty if nothing is."""
        count = len(self._leading.peers.links) + 1
        agree = 1 + sum(answer is not None and not answer.refusal for answer in answers.values())
        if 2 * agree > count:
            return ""
        said = [f"{lead} is out of reach"]
        said += [
            f"{node} {'does not answer' if answer is None else f'refuses: {answer.refusal}'}"
            for node, answer in answers.items()
            if answer is None or answer.refusal
        ]
        return (
            f"{agree} of {count} nodes agree, and a majority is {count // 2 + 1}: {'; '.join(said)}; if the machine of"
            f" {lead} is off for certain, say so with --old-lead-is-off"
        )


def _is_outdated(answers: Sequence[m.PeerConsent], term: int) -> bool:
    """Whether a refusal tells of a newer term, or of another claimant in this one."""
    return any(answer.refusal and answer.term >= term for answer in answers)
