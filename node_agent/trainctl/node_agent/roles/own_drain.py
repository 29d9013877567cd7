"""The drain of this agent's own node: why its rank must leave, and when the agent may exit."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, assert_never

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
from trainctl.protocol.record.checkpoints import is_copying

_log: Final = logging.getLogger(__name__)
LOOK_SECONDS, LOOK_AT_FILES_SECONDS = 0.05, 0.25
FAREWELL_SECONDS = 0.3
"""Seconds for which the last messages to other nodes are still being sent."""


RUN_END_SECONDS = 5.0
"""Most seconds that a node whose trainer has ended waits for a run that ends with it: it records how the run ended."""


class DrainTimeoutError(TrainctlError):
    """The node could not leave within the grace."""


class NodeDrain:
    """Begun by a signal or a notice; `serve` returns when the agent may exit."""

    def __init__(self, role: AgentRole, grace_seconds: float, runs: Path) -> None:
        """`runs`: the directory of this node's runs."""
        self._role, self._grace_seconds, self._runs = role, grace_seconds, runs
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
        await self._copied(end)
        await asyncio.sleep(FAREWELL_SECONDS)

    async def _copied(self, end: float) -> None:
        """Until no checkpoint is being copied, or `end` by the loop's clock."""
        try:
            async with asyncio.timeout_at(end):
                await _until(lambda: not is_copying(self._runs), LOOK_AT_FILES_SECONDS)
        except TimeoutError:
            _log.warning("a checkpoint was still being copied after the grace of %g s", self._grace_seconds)

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


async def _until(is_so: Callable[[], bool], look_seconds: float) -> None:
    while True:
        if is_so():
            return
        await asyncio.sleep(look_seconds)
