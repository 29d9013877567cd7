"""Pictures of the running app that come out alike each time."""

from collections.abc import Callable
from typing import Any

import msgspec
from tests.tui.support.driving import burst
from tests.tui.support.recorded import (
    CONNECTED,
    live_hosts,
    run_view,
    snapshot,
)
from textual.command import CommandList, CommandPalette
from textual.pilot import Pilot

from trainctl.protocol import messages as m


def of_two_nodes() -> m.RunView:
    """Ranks 0 and 1 on studio, 2 on forge."""
    view = run_view(4, step=18_240, steps=60_000)
    names = ("studio", "studio", "forge")
    ranks = tuple(msgspec.structs.replace(rank, node=name) for rank, name in zip(view.ranks[:3], names, strict=True))
    return msgspec.structs.replace(view, ranks=(*ranks, view.ranks[3]))


SEVERAL = (CONNECTED, snapshot(of_two_nodes()), *live_hosts(of_two_nodes()))


Compare = Callable[..., bool]


async def settled(pilot: Pilot[Any]) -> None:
    for _ in range(3):
        await pilot.pause()


async def listed(pilot: Pilot[Any]) -> None:
    """The palette gathers what it lists in the background."""
    if isinstance(pilot.app.screen, CommandPalette):
        found = pilot.app.screen.query_one(CommandList)
        count = -1
        while count != found.option_count or not count:
            count = found.option_count
            await pilot.pause(0.3)


class Typed(str):
    """Text that is typed at once: pictures don't show what was drawn between its letters."""


def still(keys: tuple[str, ...] = ()) -> Callable[[Pilot[Any]], Any]:
    """Presses keys one by one and lets each take effect; the text cursor stops blinking."""

    async def play(pilot: Pilot[Any]) -> None:
        await settled(pilot)
        for key in keys:
            if isinstance(key, Typed):
                burst(pilot.app, *key)  # type: ignore[arg-type]
            else:
                await pilot.press(key)
            await settled(pilot)
        await listed(pilot)
        pilot.app.paint()  # what is under a dialog follows at the next tick, which a slow machine may have had or not
        for widget in pilot.app.screen.query("Input"):
            widget.cursor_blink = False  # type: ignore[attr-defined]
        await settled(pilot)

    return play
