"""The drain of this agent's own node: why its rank must leave, and when the agent may exit."""

import asyncio
import time
from typing import assert_never

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
from trainctl.protocol.errors import TrainctlError

LOOK_SECONDS = 0.05
FAREWELL_SECONDS = 0.3
"""Seconds for which the last messages to other nodes are still being sent."""


RUN_END_SECONDS = 5.0
"""Most seconds that a node whose trainer has ended waits for a run that ends with it: it records how the run ended."""


class DrainTimeoutError(TrainctlError):
    """The node could not leave within the grace."""


class NodeDrain:
    """Begun by a signal or a notice; `serve` returns when the agent may exit."""

    def __init__(self, role: AgentRole, grace_seconds: float) -> None:
        self._role, self._grace_seconds = role, grace_seconds
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
        """Whether the agent exits when its node has left."""
        return self._exits.is_set()

    def call_off(self) -> None:
        """The node stays after all, unless the agent is about to exit."""
        if not self.exits:
            self._role.own_drain = None

    async def serve(self) -> None:
        """Until the agent may exit. Raises DrainTimeoutError after the grace."""
        await self._exits.wait()
        try:
            async with asyncio.timeout(self._grace_seconds):
                await self._left()
        except TimeoutError:
            text = f"this node's rank had not left after {self._grace_seconds:g} s; its trainer was left running"
            raise DrainTimeoutError(text) from None
        await asyncio.sleep(FAREWELL_SECONDS)

    async def _left(self) -> None:
        while True:
            if self.has_left:
                return
            await asyncio.sleep(LOOK_SECONDS)

    @property
    def has_left(self) -> bool:
        """Whether no rank of this node takes part in a run, and the run's lead knows that."""
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
        """Whether the run is about to end as a whole, and its lead reports that soon."""
        now = time.monotonic()
        self._ended_monotonic = self._ended_monotonic or now
        return followed.is_in_group and now < self._ended_monotonic + RUN_END_SECONDS
