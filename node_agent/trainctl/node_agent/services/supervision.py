"""What the agent does for its supervisor while it serves: says that it is ready, lives and stops; ends by
itself where no one counts its beats; and keeps a log."""

import asyncio
import contextlib
import os
import resource
import traceback
from collections.abc import AsyncIterator, Callable
from importlib.metadata import version
from pathlib import Path
from typing import IO, Protocol

from trainctl.node_agent.services import agent_log
from trainctl.node_agent.services.agent_log import log
from trainctl.node_agent.services.sd_notify import Notifier, from_environment
from trainctl.node_agent.services.watchdog import EXIT_STATUS, Watchdog
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.errors import TrainctlError

BEAT_SECONDS = 1.0
_BEATS = 4
"""Least number of beats within one limit."""


class InternalError(TrainctlError):
    """A fault in the agent's own code, after which its supervisor starts it again."""

    exit_code = EXIT_STATUS


class Working(Protocol):
    """Of an agent that has bound its addresses, what is needed here."""

    directory: Path
    publisher: Publisher

    @property
    def doing(self) -> str:
        """A line on what it does."""


@contextlib.asynccontextmanager
async def at_work(agent: Working, stall_seconds: float) -> AsyncIterator[None]:
    """Runs an agent's serving. Raises TrainctlError, its one line naming the log, for what must not happen."""
    notifier = from_environment(os.environ)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    with contextlib.closing(notifier), agent_log.kept(agent.directory) as traces:
        log.info("started: %s, pid %s, version %s, %s open files", agent.doing, os.getpid(), version("trainctl"), files)
        agent.publisher.listeners.append(agent_log.heard)
        try:
            async with supervised(notifier, stall_seconds, lambda: agent.doing, traces):
                yield
        except TrainctlError as error:
            log.error("ended: %s", error)
            raise
        except Exception as error:
            log.exception("ended by an internal error")
            where = traceback.extract_tb(error.__traceback__)[-1]
            text = f"{type(error).__name__}: {error} ({Path(where.filename).name}, line {where.lineno})"
            raise InternalError(
                f"internal error in the agent: {text}; see {agent_log.path(agent.directory)}"
            ) from error
        log.info("stopped: %s", agent.doing)


@contextlib.asynccontextmanager
async def supervised(
    notifier: Notifier, stall_seconds: float, doing: Callable[[], str], traces: Callable[[], IO[str] | None]
) -> AsyncIterator[None]:
    """`stall_seconds`: how long the event loop may stall before the process ends, 0 for as long as it likes."""
    guard = Watchdog(stall_seconds, _tell_stall, traces) if stall_seconds else None
    limits = [limit / _BEATS for limit in (notifier.watchdog_seconds, stall_seconds) if limit]
    notifier.ready(doing())
    beating = asyncio.create_task(_beat(notifier, guard, doing, min([BEAT_SECONDS, *limits])), name="supervision")
    if guard is not None:
        guard.start()
    try:
        yield
    finally:
        notifier.stopping()
        if guard is not None:
            guard.stop()
        beating.cancel()
        await asyncio.gather(beating, return_exceptions=True)


async def _beat(notifier: Notifier, guard: Watchdog | None, doing: Callable[[], str], seconds: float) -> None:
    """On the event loop, so that it beats only while that turns."""
    while True:
        notifier.beat(doing())
        if guard is not None:
            guard.beat()
        await asyncio.sleep(seconds)


def _tell_stall(seconds: float) -> None:
    log.critical("the event loop hung for %.1f s: the agent exits, and its supervisor restarts it", seconds)
