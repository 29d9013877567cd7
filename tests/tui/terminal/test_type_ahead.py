"""Keys that are typed ahead go where the Escape before them has led."""

import pytest
from tests.tui.support.driving import burst, driven, until
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.widgets.command_bar import CommandBar


@pytest.mark.parametrize("keys", [("colon", "x", "y", "escape", "c"), ("question_mark", "escape", "c")])
async def test_a_key_behind_escape_goes_where_escape_has_led(keys: tuple[str, ...]) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, *keys)
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert not app.screen_stack[-2].query_one(CommandBar).open

    await driven(source_of(1), play)
