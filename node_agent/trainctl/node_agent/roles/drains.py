"""Drains: what the lead of a run does for nodes that must leave it, and when the agent of such a node may exit.

Their ranks leave the group at the next boundary; those outside the group are ended at once. If the lead's own node must
leave, another node that stays is asked to lead the run first. If no node stays, the run stops with a checkpoint.
"""

import asyncio
import dataclasses
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Final, Literal, assert_never

from trainctl.node_agent.conductor.events import Departing, NodeReturned, Proposed
from trainctl.node_agent.roles.followed_run import FollowedRank
from trainctl.node_agent.roles.role import (
    AgentRole,
    Closing,
    Following,
    Idle,
    Leading,
    OwnDrain,
    Starting,
    WaitingToRestart,
)
from trainctl.node_agent.runs.context import AgentContext
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.transport.peer_pool import Peers
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import Notice

_log: Final = logging.getLogger(__name__)
LOOK_SECONDS, LOOK_AT_FILES_SECONDS = 0.05, 0.25
FAREWELL_SECONDS = 0.3
"""Seconds for which the last messages to other nodes are still being sent."""


RUN_END_SECONDS = 5.0
"""Most seconds that a node whose trainer has ended waits for a run that ends with it: it records how the run ended."""
LOST_SECONDS, GONE_SECONDS = 30.0, 5.0
"""Seconds the end of a run waits for a node that can't be reached, and for one that need not be waited for."""


@dataclasses.dataclass(frozen=True)
class Situation:
    """Facts on which the lead decides."""

    here: str  # the lead's node
    ranks: Mapping[int, str]  # node of each rank of the run
    live: Mapping[int, str]  # of those in the group
    leaving: Mapping[str, str]  # reasons by node
    reachable: frozenset[str]  # other nodes that are in touch
    may_hand_over: bool  # whether there is time left to hand the run over
    turn: int = 0  # how many nodes have had the time to take it over


@dataclasses.dataclass(frozen=True)
class Action:
    """Action of the lead for nodes that leave."""

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
    """Return how long the end of a run waits for a node that can't be reached. In a run that goes back to its
    checkpoint every rank starts again anyway. The agent of a node that leaves exits once its trainer has ended, even if
    its last message was lost."""
    return GONE_SECONDS if goes_back or leaving else LOST_SECONDS


class DrainingNodes:
    """Called a few times a second by the lead while it leads a run."""

    def __init__(self, context: AgentContext, role: AgentRole, peers: Peers) -> None:
        self._context, self._role, self._peers = context, role, peers
        self._wanted: tuple[Session | None, Mapping[int, str]] = (None, {})  # by whom the ranks were last drained
        self._stopped: str | None = None  # the run that was stopped because no node stayed

    async def watch(self, session: Session) -> Proposed | None:
        """A command to the run, if one is needed."""
        await self._take_back(session)
        if session.conductor.final is not None:
            return None
        action = decide(self._situation(session))
        await self._ask_successor(action.successor)
        if (session, action.ranks) != self._wanted:
            self._wanted = session, action.ranks
            await session.feed(Departing(action.ranks))
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
                await session.feed(NodeReturned(rank))

    def _stop(self, session: Session) -> Proposed | None:
        """Once for each run; not if a person has stopped it."""
        if self._stopped == session.run or session.conductor.durable.mode == "stopping":
            return None
        self._stopped = session.run
        text = "all nodes with a rank are shutting down: the run stops with a checkpoint and can be resumed"
        session.happened(Notice(text), "warning")
        id = f"{secrets.token_hex(4)}-drain"
        return Proposed(id, "stop", verbs.Stop(), "auto", None, None, text)


class DrainTimeoutError(TrainctlError):
    """The node could not leave within the grace."""


class NodeDrain:
    """Begun by a signal or a notice; `serve` returns when the agent may exit."""

    def __init__(self, role: AgentRole, grace_seconds: float, is_copying: Callable[[], bool]) -> None:
        """`is_copying`: whether a checkpoint of this node is being copied elsewhere, or is about to be."""
        self._role, self._grace_seconds, self._is_copying = role, grace_seconds, is_copying
        self._exits = asyncio.Event()
        self._ended_monotonic: float | None = None  # when its rank was first seen to have ended

    def begin(self, why: str, *, exits: bool) -> None:
        """Have this node's rank leave. `exits`: then the agent exits, at the latest after the grace."""
        now = time.monotonic()
        if self._role.own_drain is None or exits:
            self._role.own_drain = OwnDrain(why, now, self._grace_seconds)
        if exits:
            self._exits.set()

    @property
    def exits(self) -> bool:
        """Return whether the agent exits when its node has left."""
        return self._exits.is_set()

    def call_off(self) -> None:
        """The node stays after all, unless the agent is about to exit."""
        if not self.exits:
            self._role.own_drain = None

    async def serve(self) -> None:
        """Until the agent may exit: its rank has left, and no checkpoint is being copied elsewhere, for that may end
        with the agent. Raises DrainTimeoutError if the rank hasn't left after the grace."""
        await self._exits.wait()
        end = asyncio.get_running_loop().time() + self._grace_seconds
        try:
            async with asyncio.timeout_at(end):
                await _until(lambda: self.has_left, LOOK_SECONDS)
        except TimeoutError:
            text = f"this node's rank had not left after {self._grace_seconds:g} s; its trainer was left running"
            raise DrainTimeoutError(text) from None
        try:
            async with asyncio.timeout_at(end):
                await _until(lambda: not self._is_copying(), LOOK_AT_FILES_SECONDS)
        except TimeoutError:
            _log.warning("a checkpoint was still being copied after the grace of %g s", self._grace_seconds)
        await asyncio.sleep(FAREWELL_SECONDS)

    @property
    def has_left(self) -> bool:
        """Return whether no rank of this node takes part in a run, and the run's lead knows that."""
        match self._role.now:
            case Idle() | WaitingToRestart():
                return True
            case Following(rank):
                return rank.ending is not None and rank.told_ending and not self._awaits_end(rank)
            case Starting() | Leading() | Closing():
                return False
            case _ as missing:
                assert_never(missing)

    def _awaits_end(self, followed: FollowedRank) -> bool:
        """Return whether the run is about to end as a whole, and its lead reports that soon."""
        now = time.monotonic()
        self._ended_monotonic = self._ended_monotonic or now
        return followed.is_in_group and now < self._ended_monotonic + RUN_END_SECONDS


async def _until(is_so: Callable[[], bool], look_seconds: float) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(look_seconds)
