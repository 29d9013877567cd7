"""Transfer of an active run's leadership to this node, while its trainers continue."""

import asyncio
import contextlib
import logging
from typing import Final, NamedTuple, Protocol

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.records.keys import DURABLE_KEY
from trainctl.node_agent.roles.election import Claim
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import restore
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.launch import Launch
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages import verbs

_log: Final = logging.getLogger(__name__)
LAG_STEPS = 8
"""Most steps that may be planned but not known to be committed; ranks repeat their newest reports, which covers
these."""


class Released(NamedTuple):
    """A run that an agent leads no more."""

    run: KnownRun
    rank: int | None  # this node's, None if it has none


class _Conducting(Protocol):
    """The part of an agent that leads."""

    peers: Peers
    launch: Launch

    async def take_over(self, known: KnownRun, term: int, before: str) -> int: ...


class Transfer:
    """Carries out `promote` on the node that it names."""

    def __init__(self, context: AgentContext, role: AgentRole, conducting: _Conducting, hosting: RankHosting) -> None:
        self._context, self._role, self._conducting, self._hosting = context, role, conducting, hosting
        self._succession: asyncio.Task[None] | None = None  # the newest try to succeed a lead that leaves
        self._has_failed = False  # whether one ended by an error that isn't expected

    async def promote(self, command: m.Command, args: verbs.Promote) -> d.CommandEnded:
        """Lead the run followed here. Raises InvalidInputError; then only terms consented to have changed."""
        followed = self._check(command)
        self._conducting.launch.check_take_over(followed.paths)
        before = followed.known.lead
        term = await self._consented(followed, args.old_lead_is_off)
        step = await self._take_over(followed, term)
        self._context.db.set_run(command.id, followed.run)
        return d.CommandEnded(command.id, "applied", step, made=e.LeadChanged(before, self._context.node, term))

    def succeed(self) -> None:
        """Begin to lead the run that is followed here, whose lead leaves; called again and again until that has
        succeeded. Not on a node that leaves too."""
        is_free = self._succession is None or self._succession.done()
        if is_free and self._role.followed is not None and self._role.own_drain is None:
            self._succession = asyncio.get_running_loop().create_task(self._succeed(self._role.followed))

    async def _succeed(self, followed: FollowedRank) -> None:
        try:
            self._check_copy(followed)
            self._conducting.launch.check_take_over(followed.paths)
            await self._take_over(followed, await self._consented(followed, False))
        except (InvalidInputError, RefusedError):
            return  # the lead asks again with its next ping
        except Exception:  # noqa: BLE001  a fault here must not pass unseen, and the lead may ask again
            if not self._has_failed:
                _log.exception("%s could not be led here in place of %s", followed.run, followed.known.lead)
            self._has_failed = True

    def close(self) -> None:
        """Succeed no lead any more: this agent ends."""
        if self._succession is not None:
            self._succession.cancel()

    async def reclaim(self, term: int) -> None:
        """Lead again the run that is followed and was handed over in `term`, for its claimant has not greeted this
        node. A reachable lead is asked first: if the claimant has begun it hands over what it has committed. Where
        the cluster has no quorum it isn't waited for either."""
        followed = self._role.followed
        if followed is not None and followed.wanted is None and self._role.run is None:
            self._context.db.saw(m.Generation(term, 0))
            with contextlib.suppress(InvalidInputError):
                await self._take_over(followed, await self._consented(followed, not self._context.cluster.quorum))

    async def _take_over(self, followed: FollowedRank, term: int) -> int:
        """Gives the step that the run stands at. Raises InvalidInputError, and follows it then as before."""
        row, known = self._hosting.release()
        try:
            step = await self._conducting.take_over(row, term, known.lead)
        except InvalidInputError:
            self._hosting.adopt(row, known)
            raise
        self._context.db.unfollow(row.run)
        return step

    async def _consented(self, followed: FollowedRank, old_lead_is_off: bool) -> int:
        """The term in which the run that is followed may be led here. Raises InvalidInputError."""
        lead, term = followed.known.lead, followed.generation.term
        self._context.db.saw(m.Generation(restore.kept_term(followed.paths), 0))

        def still() -> None:
            if self._role.followed is not followed or followed.wanted is not None:
                raise InvalidInputError("node", f"{followed.run} has ended in the meantime")
            if (followed.known.lead, followed.generation.term) != (lead, term):
                raise InvalidInputError("node", f"{followed.known.lead} now leads {followed.run}")

        return await Claim(self._context, self._conducting.peers, followed, lead, still).consented(old_lead_is_off)

    def _check(self, command: m.Command) -> FollowedRank:
        node, followed = self._context.node, self._role.followed
        if command.node != node:
            raise InvalidInputError("node", f"no node {command.node!r} in this agent's cluster")
        if self._role.run is not None:
            raise InvalidInputError("node", f"{node} already leads {self._role.run}")
        if followed is None or followed.wanted is not None:
            raise InvalidInputError("node", f"{node} has no rank in an active run, so it has no record of one")
        if command.run is not None and command.run != followed.run:
            raise InvalidInputError("run", f"{node} has a rank of {followed.run}, not of {command.run}")
        self._check_copy(followed)
        return followed

    def _check_copy(self, followed: FollowedRank) -> None:
        """Raises InvalidInputError if this node's copy of the record isn't recent enough to lead from."""
        node = self._context.node
        if followed.recorder.meta(DURABLE_KEY) is None:
            raise InvalidInputError("node", f"{node} has not received the run's record yet; try again in a moment")
        known = followed.recorder.last_state()
        step, planned = known.step.step if known.step else 0, known.plan.step if known.plan else 0
        if planned > step + LAG_STEPS:
            text = f"{node}'s copy of the record is still catching up: it has step {step:,} of {planned:,}"
            raise InvalidInputError("node", text)
