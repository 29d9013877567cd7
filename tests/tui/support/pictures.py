"""Pictures of the running app that come out alike each time, compared with those in `__snapshots__`."""

import difflib
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
from syrupy.assertion import SnapshotAssertion
from syrupy.extensions.single_file import SingleFileSnapshotExtension, WriteMode
from tests.tui.support.driving import burst
from tests.tui.support.recorded import (
    CONNECTED,
    live_hosts,
    run_view,
    snapshot,
)
from textual._context import visible_screen_stack
from textual.command import CommandList, CommandPalette
from textual.pilot import Pilot
from tools.pictures import as_text

from trainctl.protocol import messages as m
from trainctl.tui.app.app import TrainctlApp

ROWS = {80: 24, 120: 40, 200: 60}
Play = Callable[[Pilot[Any]], Awaitable[None]]


class TextPicture(SingleFileSnapshotExtension):
    """A file of text a picture; `--snapshot-update` writes it, and removes those that no test draws."""

    _file_extension = "txt"
    _write_mode = WriteMode.TEXT

    def serialize(self, data: Any, **options: Any) -> str:
        return str(data)


class Pictures:
    """Draws the app and compares it with the picture that is kept for the test."""

    def __init__(self, kept: SnapshotAssertion) -> None:
        self._kept = kept.use_extension(TextPicture)

    async def compare(self, app: TrainctlApp, columns: int, *keys: str, play: Play | None = None) -> None:
        """Compare what the app shows after the keys, or after `play`; fail with a diff."""
        async with app.run_test(size=(columns, ROWS.get(columns, 12)), notifications=True) as pilot:
            await (play or still(*keys))(pilot)
            await pilot.wait_for_scheduled_animations()
            await pilot.pause()
            drawn = as_text(screen_strips(app), columns)
        if self._kept != drawn:
            result = list(self._kept.executions.values())[-1]
            before = str(result.recalled_data or "").splitlines()
            diff = difflib.unified_diff(before, drawn.splitlines(), "kept", "drawn", n=1, lineterm="")
            accept = f"to accept it: pytest '{result.test_location.item.nodeid}' --snapshot-update"
            pytest.fail("\n".join([*diff, accept]), pytrace=False)


def at_columns(*columns: int) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("columns", columns, ids=[f"{many}x{ROWS[many]}" for many in columns])


def screen_strips(app: TrainctlApp) -> list[Any]:
    """Return what the terminal is sent, row by row."""
    visible_screen_stack.set(app._background_screens)  # what is behind a dialog; the compositor says so as it draws
    return app.screen._compositor.render_strips()


def of_two_nodes() -> m.RunView:
    """Ranks 0 and 1 on studio, 2 on forge."""
    view = run_view(4, step=18_240, steps=60_000)
    names = ("studio", "studio", "forge")
    ranks = tuple(msgspec.structs.replace(rank, node=name) for rank, name in zip(view.ranks[:3], names, strict=True))
    return msgspec.structs.replace(view, ranks=(*ranks, view.ranks[3]))


SEVERAL = (CONNECTED, snapshot(of_two_nodes()), *live_hosts(of_two_nodes()))


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


def still(*keys: str) -> Play:
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
