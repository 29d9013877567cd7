"""The end of asyncio tasks, in which no cancellation is lost."""

import asyncio
from collections.abc import Iterable
from typing import Any

AGAIN_SECONDS = 10.0
"""Seconds after which a task that has not ended is cancelled again: what it awaited may have swallowed the first."""


async def end_tasks(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until all have ended, whatever their outcomes. Raises CancelledError if the caller is
    cancelled meanwhile, unlike `suppress(CancelledError)` around an await, which would swallow that."""
    ended, left = set[asyncio.Task[Any]](), set(tasks)
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=AGAIN_SECONDS)
        ended |= done
    for task in ended:
        if not task.cancelled():
            task.exception()  # else asyncio reports it as never retrieved
