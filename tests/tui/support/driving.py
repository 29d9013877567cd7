"""Drives the program in tests: keys in, text out, every wait with a deadline."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.tui.support.recorded import Recorded, app_of  # fmt: skip
from tests.waiting import HANG_SECONDS
from textual import events
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.state.view_state import Clock
from trainctl.tui.widgets.line_view import Lines

DEADLINE_SECONDS = HANG_SECONDS


async def until(pilot: Pilot[int], true: Callable[[], bool]) -> None:
    """Lets the program run until something is so; fails at the deadline."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while not true():
            await pilot.pause(0.01)


def body(app: TrainctlApp) -> str:
    return "\n".join(app.screen.query_one("#body", Lines).shown)


def dialog_text(app: TrainctlApp) -> str:
    return "\n".join(app.screen.query_one("#dialog-text", Lines).shown)


def hint(app: TrainctlApp) -> str:
    return app.screen.query_one("#keys", Lines).shown[0]


@asynccontextmanager
async def running(
    source: Recorded, size: tuple[int, int] = (80, 24), **options: Any
) -> AsyncIterator[tuple[Pilot[int], TrainctlApp]]:
    """Run the program over a recorded agent that it has heard."""
    app = app_of(source, **options)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.live.heard_at is not None or not source.messages)
        await until(pilot, lambda: not app.feed._waiting)
        await pilot.pause()
        yield pilot, app


async def driven(
    source: Recorded,
    play: Callable[[Pilot[int], TrainctlApp], Awaitable[None]],
    size: tuple[int, int] = (80, 24),
    **options: Any,
) -> TrainctlApp:
    async with running(source, size, **options) as (pilot, app):
        await play(pilot, app)
    return app


def burst(app: TrainctlApp, *keys: str) -> None:
    for key in keys:
        character = {"space": " "}.get(key, key if len(key) == 1 else {"colon": ":", "slash": "/"}.get(key))
        name = {" ": "space", "=": "equals_sign", "%": "percent_sign", ":": "colon"}.get(key, key)
        app.post_message(events.Key(name, character))


class MovingClock(Clock):
    """A clock that advances only on request."""

    at = 0.0

    def monotonic(self) -> float:
        return self.at
