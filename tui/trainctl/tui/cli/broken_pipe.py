"""Ends what writes to a pipe when its reader has gone, also while there is nothing to write."""

import asyncio
import contextlib
import select
import sys
from collections.abc import AsyncIterator

LOOK_SECONDS = 0.5
GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


@contextlib.asynccontextmanager
async def reader_watched() -> AsyncIterator[None]:
    """Raises BrokenPipeError from the block once nobody can read standard output any more."""
    task, descriptor = asyncio.current_task(), _descriptor()
    assert task is not None
    if descriptor is None:
        yield
        return
    watch = asyncio.create_task(_until_gone(descriptor), name="trainctl-reader")
    watch.add_done_callback(lambda done: None if done.cancelled() else task.cancel())
    try:
        yield
    except asyncio.CancelledError:
        if watch.done() and task.uncancel() == 0:
            raise BrokenPipeError from None
        raise
    finally:
        watch.cancel()


async def _until_gone(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)
    while True:
        if any(state & GONE for _, state in poll.poll(0)):
            return
        await asyncio.sleep(LOOK_SECONDS)


def _descriptor() -> int | None:
    """Of standard output, or None where it is no file of the system's."""
    try:
        return sys.stdout.fileno()
    except (OSError, ValueError):
        return None
