"""Votes of this node for others that claim to lead a run: it consents to one claimant per term."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec

from trainctl.node_agent.records.agent_db import FollowedRun
from trainctl.node_agent.records.replication import EndedRun
from trainctl.node_agent.roles.rank_hosting import NO_RANK
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.context import AgentContext
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.wire import codec

Beyond = Callable[[m.HostedRank], list[m.Kept]]
"""Returns what the record of the run that this node leads has beyond a claimant's. Raises RefusedError if that is
much."""
HandOver = Callable[[str, str, int], Awaitable[None]]
"""Follows the claimant at an address, which leads this agent's run in a term from then on. Raises RefusedError."""


class Votes:
    """Judges claims by what this node takes part in, has consented to and has seen."""

    def __init__(self, context: AgentContext, role: AgentRole, beyond: Beyond, hand_over: HandOver) -> None:
        self._context, self._node, self._db = context, context.node, context.db
        self._role, self._own_beyond, self._hand_over = role, beyond, hand_over

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

    async def answer(self, claimant: str, address: str, claim: m.PeerClaim) -> m.PeerConsent:
        """The answer to the claimant, whose agent takes requests at `address`; its link and number are still open."""
        active = self._active
        said = m.PeerConsent(link="", seq=0, run=claim.run, term=claim.term, hosted=self._hosted)
        refusal, items = self._objection(claimant, claim), list[m.Kept]()
        try:
            row = self._db.known_run(claim.run) if not claim.term else None
            if row is not None:
                newest = await asyncio.to_thread(checkpoint_source.newest_here, RunPaths(row.directory))
                step, generation, cursor = newest
                said = msgspec.structs.replace(
                    said, checkpoint=step, checkpoint_generation=generation, checkpoint_cursor=cursor
                )
            if not refusal and claim.resume:
                said, items, refusal = self._beyond_ended(claimant, address, claim, said)
            elif not refusal and self._role.run == claim.run:
                items += self._own_beyond(claim.hosted)
                await self._hand_over(claimant, address, claim.term)
                items += [row for row in self._db.open_commands() if row.run == claim.run]
                said = msgspec.structs.replace(said, hosted=self._hosted)
            elif not refusal and self._role.followed is not None:
                items += self._role.followed.beyond(claim.hosted)
        except (InvalidInputError, RefusedError) as error:
            refusal, items = str(error), []
        if refusal:
            taking_part = active is not None
            return msgspec.structs.replace(said, term=self._db.term, refusal=refusal, takes_part=taking_part)
        return msgspec.structs.replace(said, items=tuple(map(codec.encode, items)))

    @property
    def _active(self) -> str | None:
        """The run that this node takes part in."""
        followed = self._role.followed
        return self._role.run or (followed.run if followed is not None else None)

    @property
    def _hosted(self) -> m.HostedRank | None:
        return self._role.followed.hosted if self._role.followed is not None else None

    def _objection(self, claimant: str, claim: m.PeerClaim) -> str:
        """Why this node doesn't consent, empty if it does; from then on to no one else in that term."""
        active = self._active
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
        self, claimant: str, address: str, claim: m.PeerClaim, said: m.PeerConsent
    ) -> tuple[m.PeerConsent, list[m.Kept], str]:
        """Return what this node's record of a run that has ended has beyond the claimant's, or why that can't be told.
        If its own agent led the run it leads it no more. Raises InvalidInputError."""
        row = self._db.known_run(claim.run)
        if row is None:
            return said, [], ""
        known = self._db.followed(claim.run)
        rank = known.rank if known is not None else self._own_rank(RunPaths(row.directory))
        with EndedRun(row, rank if rank != NO_RANK else None) as ended:
            said = msgspec.structs.replace(said, hosted=ended.hosted)
            try:
                items = ended.beyond(claim.hosted)
            except RefusedError as error:
                return said, [], str(error)
        if known is None:
            self._db.follow(FollowedRun(claim.run, rank, claimant, address))
        return said, items, ""

    def _own_rank(self, paths: RunPaths) -> int:
        ranks = restore.kept_ranks(paths).items()
        return next((rank for rank, node in ranks if node == self._node), NO_RANK)
