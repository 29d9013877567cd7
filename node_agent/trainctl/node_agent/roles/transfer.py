"""Transfer of a run to this node: of an active one, while its trainers continue, and of one that has ended.

Both need the consent of the node that led it, or what an election asks for.
"""

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Final

from trainctl.node_agent.conductor.events import CommandEnded
from trainctl.node_agent.planning.durable import next_term
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.records.keys import DURABLE_KEY
from trainctl.node_agent.records.replication import EndedRun
from trainctl.node_agent.roles.election import Claim
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.roles.rank_hosting import RankHosting
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs import checkpoint_source, restore
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.launch import Launch
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol import messages
from trainctl.protocol.errors import InvalidInputError, RefusedError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import LeadChanged
from trainctl.protocol.record.paths import RunPaths

_log: Final = logging.getLogger(__name__)
LAG_STEPS = 8
"""Most steps that may be planned but not known to be committed; ranks repeat their newest reports, which covers
these."""


TakeOver = Callable[[KnownRun, int, str], Awaitable[int]]
"""Leads a run from a term on that a node led before, and returns the step it stands at. Raises InvalidInputError."""


class Transfer:
    """Carries out `promote` on the node that it names."""

    def __init__(
        self,
        context: AgentContext,
        role: AgentRole,
        peers: Peers,
        launch: Launch,
        hosting: RankHosting,
        take_over: TakeOver,
    ) -> None:
        self._context, self._role, self._peers, self._launch = context, role, peers, launch
        self._hosting, self._lead = hosting, take_over
        self._succession: asyncio.Task[None] | None = None  # the newest try to succeed a lead that leaves
        self._has_failed = False  # whether one ended by an error that isn't expected

    async def promote(self, command: messages.Command, args: verbs.Promote) -> CommandEnded:
        """Lead the run followed here. Raises InvalidInputError; then only terms consented to have changed."""
        followed = self._check(command)
        before = followed.known.lead
        term = await self._consented(followed, args.old_lead_is_off)
        step = await self._take_over(followed, term)
        self._context.db.set_run(command.id, followed.run)
        return CommandEnded(command.id, "applied", step, made=LeadChanged(before, self._context.node, term))

    def foresee(self, command: messages.Command) -> LeadChanged:
        """Return what `promote` would do as far as this node knows; it asks no node for its consent. Raises
        InvalidInputError."""
        followed = self._check(command)
        above = max(self._context.db.term, followed.generation.term)
        term = next_term(above, self._context.node, self._peers.links)
        return LeadChanged(followed.known.lead, self._context.node, term)

    def succeed(self) -> None:
        """Begin to lead the run that is followed here, whose lead leaves; called again and again until that has
        succeeded. Not on a node that leaves too."""
        is_free = self._succession is None or self._succession.done()
        if is_free and self._role.followed is not None and self._role.own_drain is None:
            self._succession = asyncio.get_running_loop().create_task(self._succeed(self._role.followed))

    async def _succeed(self, followed: FollowedRank) -> None:
        try:
            self._check_copy(followed)
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
        if followed is not None and followed.wanted is None:
            self._context.db.saw(messages.Generation(term, 0))
            with contextlib.suppress(InvalidInputError):
                await self._take_over(followed, await self._consented(followed, not self._context.cluster.quorum))

    async def _take_over(self, followed: FollowedRank, term: int) -> int:
        """Gives the step that the run stands at. Raises InvalidInputError, and follows it then as before."""
        row, known = self._hosting.release()
        try:
            step = await self._lead(row, term, known.lead)
        except InvalidInputError:
            self._hosting.adopt(row, known)
            raise
        self._context.db.unfollow(row.run)
        return step

    async def _consented(self, followed: FollowedRank, old_lead_is_off: bool) -> int:
        """The term in which the run that is followed may be led here. Raises InvalidInputError."""
        lead, term = followed.known.lead, followed.generation.term
        self._context.db.saw(messages.Generation(restore.kept_term(followed.paths), 0))

        def check() -> None:
            if self._role.followed is not followed or followed.wanted is not None:
                raise InvalidInputError("node", f"{followed.run} has ended in the meantime")
            if (followed.known.lead, followed.generation.term) != (lead, term):
                raise InvalidInputError("node", f"{followed.known.lead} now leads {followed.run}")

        return await Claim(self._context, self._peers, followed, lead, check).consented(old_lead_is_off)

    def _check(self, command: messages.Command) -> FollowedRank:
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
        """Raises InvalidInputError if this node's copy of the record isn't recent enough to lead from, or has nodes
        that this cluster hasn't."""
        node = self._context.node
        if followed.recorder.meta(DURABLE_KEY) is None:
            raise InvalidInputError("node", f"{node} has not received the run's record yet; try again in a moment")
        known = followed.recorder.last_state()
        step, planned = known.step.step if known.step else 0, known.plan.step if known.plan else 0
        if planned > step + LAG_STEPS:
            text = f"{node}'s copy of the record is still catching up: it has step {step:,} of {planned:,}"
            raise InvalidInputError("node", text)
        self._launch.check_take_over(followed.paths)


@dataclasses.dataclass(frozen=True)
class Taken:
    """Ranks that the run has to do without, and what its events should say about it."""

    without: Mapping[int, str]  # ranks whose nodes are unreachable or leaving, with the reasons
    notices: tuple[str, ...]


class Adoption:
    """Makes a run that has ended this node's own, before it is taken up."""

    def __init__(self, context: AgentContext, role: AgentRole, peers: Peers, launch: Launch) -> None:
        self._context, self._role, self._peers, self._launch = context, role, peers, launch

    async def take(self, command: messages.Command, args: verbs.StartRun) -> Taken:
        """Agree with other nodes on what must be agreed before `args.resume` is opened here. Raises InvalidInputError,
        and then nothing has changed but the terms that nodes have consented to."""
        run, node = args.resume or "", self._context.node
        row = self._context.db.known_run(run)
        if row is None:
            raise InvalidInputError("resume", f"no run {run!r} on {node}: choose a node with a copy of its record")
        known, waiting = self._context.db.followed(run), self._role.waiting
        if known is None and (command.node is None or (waiting is not None and waiting.run == run)):
            return _taken(RunPaths(row.directory), (), await self._leaving(RunPaths(row.directory)))
        lead = known.lead if known is not None else node
        with EndedRun(row, known.rank if known is not None and known.rank >= 0 else None) as ended:
            if not ended.is_conductable:
                raise InvalidInputError("resume", f"{node} has no record of {run}: the run never began here")
            out = {lead} if lead != node and not self._peers.is_open(lead) else set[str]()
            missed = await self._check_reach(row, out, old_lead_is_off=args.old_lead_is_off)
            leaving = await self._leaving(ended.paths, out)
            claim = Claim(self._context, self._peers, ended, lead, self.check_free, resume=True)
            term = await claim.consented(args.old_lead_is_off)
        restore.own(ended.paths, term)
        self._context.db.saw(messages.Generation(term, 0))
        self._context.db.unfollow(run)
        said = f"{node} now leads the run (term {term}, previously {lead})" if lead != node else ""
        return _taken(ended.paths, out, leaving, said, missed)

    def check_free(self) -> None:
        """Raises InvalidInputError while this node takes part in a run that another one leads."""
        node, followed = self._context.node, self._role.followed
        if followed is None:
            return
        lead, text = followed.known.lead, f"{node} takes part in {followed.run} (lead: {followed.known.lead})"
        if followed.wanted is None and not self._peers.is_open(lead):
            text += f"; the run is active, but {lead} is unreachable: to make this node the lead, run trainctl "
            text += f"promote {node}"
        raise InvalidInputError("run", text)

    async def _leaving(self, paths: RunPaths, out: Collection[str] = ()) -> dict[str, str]:
        """The other nodes with ranks that are leaving, as one with a spot notice is, and why. Raises InvalidInputError
        if no other node but those `out` has a rank that isn't drained, or the newest checkpoint."""
        ranks, links = restore.kept_ranks(paths), self._peers.links
        nodes = [node for node in links if links[node].leaving and links[node].line.open and node not in out]
        reasons = {node: links[node].leaving for node in nodes if node in ranks.values()}
        if not reasons:
            return {}
        gone, node, at_most = {*reasons, *out}, self._context.node, restore.rollback_step(paths)
        drained = restore.drained_ranks(paths)
        if gone.issuperset(where for rank, where in ranks.items() if rank not in drained):
            raise InvalidInputError("resume", f"{', '.join(_in_words(reasons))}; no other node has a rank that trains")
        newest = await asyncio.to_thread(checkpoint_source.find, paths, node, out, at_most=at_most)
        there = await asyncio.to_thread(checkpoint_source.find, paths, node, gone, at_most=at_most)
        if there.step < newest.step:
            where = f"{newest.node} has the newest checkpoint, step-{newest.step}, and is leaving"
            problem = f"{where} ({reasons[newest.node]}); resume when {newest.node} is back"
            raise InvalidInputError("resume", problem)
        return reasons

    async def _check_reach(self, row: KnownRun, out: Collection[str], *, old_lead_is_off: bool) -> str:
        """Return whether all nodes of the run but those `out`, and its newest checkpoint, can be reached; gives what is
        lost where an older one has to do. Raises InvalidInputError."""
        paths, node = RunPaths(row.directory), self._context.node
        self._launch.check_take_over(paths)
        for other in restore.kept_ranks(paths).values():
            if other != node and other not in out and not self._peers.is_open(other):
                why = self._peers.links[other].line.why
                raise InvalidInputError("resume", f"{other} has a rank of {row.run} and is unreachable: {why}")
        at_most = restore.rollback_step(paths)
        newest = await asyncio.to_thread(checkpoint_source.find, paths, node, at_most=at_most)
        if newest.node not in out:
            return ""
        there = await asyncio.to_thread(checkpoint_source.find, paths, node, out, at_most=at_most)
        which = f" up to step {at_most}, to which the run is to go back" if at_most is not None else ""
        text = f"the newest checkpoint{which}, step-{newest.step}, is on {newest.node} (unreachable)"
        if not there.step:
            raise InvalidInputError("resume", f"{text}, and there is no other; resume when {newest.node} is back")
        text += f"; the newest reachable one is step-{there.step}, on {there.node}"
        if not old_lead_is_off:
            raise InvalidInputError("resume", f"{text}: to continue from that one, add --old-lead-is-off")
        return text


def _taken(paths: RunPaths, out: Collection[str], leaving: Mapping[str, str], *notices: str) -> Taken:
    ranks = restore.kept_ranks(paths).items()
    without = {rank: "was unreachable when the run was resumed" for rank, node in ranks if node in out}
    for rank, node in ranks:
        if node in leaving:
            without[rank] = f"was leaving when the run was resumed: {leaving[node]}"
    return Taken(without, (*filter(None, notices), *_in_words(leaving)))


def _in_words(leaving: Mapping[str, str]) -> list[str]:
    return [f"{node} is leaving: {why}" for node, why in leaving.items()]
