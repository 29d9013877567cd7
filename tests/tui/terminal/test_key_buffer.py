"""Keys as a terminal sends them: Escape by itself and with a key close behind it, and what is typed ahead."""

import pytest
from tests.tui.support.driving import burst, driven, until
from tests.tui.support.recorded import app_of, source_of
from textual import events
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.terminal.driver import KeyParser, TerminalDriver
from trainctl.tui.widgets.command_bar import CommandBar


@pytest.mark.parametrize(
    ("sent", "keys"),
    [
        ("\x1b", ["escape"]),
        ("\x1b\x1b", ["escape", "escape"]),
        ("\x1b0", ["alt+0"]),
        ("\x1bO", ["alt+O"]),
        ("\x1b[", ["alt+left_square_bracket"]),
        ("\x1bx1", ["alt+x", "1"]),
        ("\x1b[A", ["up"]),
        ("\x1b[1;3C", ["alt+right"]),
        ("a\x1b[200~0\x1b[201~b", ["a", "b"]),
    ],
)
def test_keys_behind_escape_are_told_apart_from_sequences(sent: str, keys: list[str]) -> None:
    parser = KeyParser()
    found = [*parser.feed(sent), *parser.give_up()]
    assert [event.key for event in found if isinstance(event, events.Key)] == keys
    assert not parser.waits


def test_a_terminal_gets_the_driver_that_tells_escape_soon() -> None:
    assert app_of(source_of(1)).get_driver_class() is TerminalDriver


@pytest.mark.parametrize("keys", [("colon", "x", "y", "escape", "c"), ("question_mark", "escape", "c")])
async def test_a_key_behind_escape_goes_where_escape_has_led(keys: tuple[str, ...]) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, *keys)
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert not app.screen_stack[-2].query_one(CommandBar).open

    await driven(source_of(1), play)
