"""Draining nodes: what the lead of a run does for nodes that must leave it, its own included.

Their ranks leave the group at the next boundary; those outside the group are ended at once. If the lead's own node must
leave, another node that stays is asked to lead the run first. If no node stays, the run stops with a checkpoint.
"""

import dataclasses
import secrets
import time
from collections.abc import Mapping
from typing import Literal, NamedTuple

from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.roles.role import AgentRole
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages import verbs

LOST_SECONDS, GONE_SECONDS = 30.0, 5.0
"""Seconds the end of a run waits for a node that can't be reached, and for one that need not be waited for."""


class Situation(NamedTuple):
    """What is known when the lead decides."""

    here: str  # the lead's node
    ranks: Mapping[int, str]  # node of each rank of the run
    live: Mapping[int, str]  # of those in the group
    leaving: Mapping[str, str]  # reasons by node
    reachable: frozenset[str]  # other nodes that are in touch
    may_hand_over: bool  # whether there is time left to hand the run over
    turn: int = 0  # how many nodes have had the time to take it over


@dataclasses.dataclass(frozen=True)
class Action:
    """What the lead does about it."""

    kind: Literal["none", "drain", "hand-over", "stop"]
    ranks: Mapping[int, str] = dataclasses.field(default_factory=dict)  # drain: the reasons
    successor: str = ""  # hand-over: the node that is to lead, empty while none is in touch


def decide(now: Situation) -> Action:
    """Pure. The run stops if no node stays that has a rank."""
    if not now.leaving:
        return Action("none")
    staying = dict.fromkeys(node for node in now.live.values() if node not in now.leaving)
    hands_over = now.here in now.leaving
    if not staying or (hands_over and not now.may_hand_over):
        return Action("stop")
    if hands_over:
        successors = [node for node in staying if node in now.reachable]
        return Action("hand-over", successor=successors[now.turn % len(successors)] if successors else "")
    return Action("drain", {rank: now.leaving[node] for rank, node in now.ranks.items() if node in now.leaving})


def awaited_seconds(*, goes_back: bool, leaving: bool) -> float:
    """How long the end of a run waits for a node that can't be reached. In a run that goes back to its checkpoint every
    rank starts again anyway. The agent of a node that leaves exits once its trainer has ended, even if its last message
    was lost."""
    return GONE_SECONDS if goes_back or leaving else LOST_SECONDS


class DrainingNodes:
    """Called a few times a second by the lead while it leads a run."""

    def __init__(self, context: AgentContext, role: AgentRole, peers: Peers) -> None:
        self._context, self._role, self._peers = context, role, peers
        self._wanted: tuple[Session | None, Mapping[int, str]] = (None, {})  # by whom the ranks were last drained
        self._stopped: str | None = None  # the run that was stopped because no node stayed

    async def watch(self, session: Session) -> d.Proposed | None:
        """A command to the run, if one is needed."""
        await self._take_back(session)
        if session.conductor.final is not None:
            return None
        action = decide(self._situation(session))
        await self._ask_successor(action.successor)
        if (session, action.ranks) != self._wanted:
            self._wanted = session, action.ranks
            await session.feed(d.Departing(action.ranks))
        if action.kind != "stop":
            self._stopped = None
            return None
        return self._stop(session)

    async def rest(self) -> None:
        """No run is led here: no node is asked to lead one in this one's place."""
        await self._ask_successor("")

    def _situation(self, session: Session) -> Situation:
        settings = session.conductor.durable.settings
        ranks = {rank: setting.node for rank, setting in settings.ranks.items()}
        live = {rank: ranks[rank] for rank in settings.live}
        leaving = {node: link.leaving for node, link in self._peers.links.items() if link.leaving}
        own = self._role.own_drain
        if own is not None:
            leaving[self._context.node] = own.why
        reachable = frozenset(node for node, link in self._peers.links.items() if link.line.open)
        at = time.monotonic()
        in_time, turn = (own.may_hand_over(at), own.turn(at)) if own is not None else (True, 0)
        return Situation(self._context.node, ranks, live, leaving, reachable, in_time, turn)

    async def _ask_successor(self, successor: str) -> None:
        for node, link in self._peers.links.items():
            await link.yield_lead(wanted=node == successor)

    async def _take_back(self, session: Session) -> None:
        """The ranks of nodes that had left, and are there again."""
        for rank in session.conductor.durable.departed:
            node = session.conductor.durable.settings.ranks[rank].node
            link = self._peers.links.get(node)
            is_back = self._role.own_drain is None if link is None else link.line.open and not link.leaving
            if is_back and (link is not None or node == self._context.node):
                await session.feed(d.NodeReturned(rank))

    def _stop(self, session: Session) -> d.Proposed | None:
        """Once for each run; not if a person has stopped it."""
        if self._stopped == session.run or session.conductor.durable.mode == "stopping":
            return None
        self._stopped = session.run
        text = "all nodes with a rank are shutting down: the run stops with a checkpoint and can be resumed"
        session.note(d.Happened(e.Notice(text), "warning", "auto", session.conductor.progress.step))
        id = f"{secrets.token_hex(4)}-drain"
        return d.Proposed(id, "stop", verbs.Stop(), "auto", None, None, text)
