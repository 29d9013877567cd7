"""The shell around the screens: the mouse in dialogs, the read-only switch, and who else is attached."""

import random

from tests.tui.support.driving import body, burst, dialog_text, driven, hint, until
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.commands.command import Order
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.widgets.command_bar import CommandBar
from trainctl.tui.widgets.line_view import Lines


async def test_no_verb_is_sent_read_only() -> None:
    """Not by a dialog's keys, not by a click, not by whatever else makes an order."""
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        for verb in verbs.VERBS:
            app.open_dialog(verb)
            await pilot.pause()
            text = app.screen.query_one("#dialog-text", Lines)
            assert "read-only" in dialog_text(app)
            assert "enter sends" not in dialog_text(app)
            asks_yes = verb in ("stop", "promote", "rollback")  # there enter means no
            await pilot.press(*(("a", "enter") if verb == "rebalance" else ("y",) if asks_yes else ("enter", "y")))
            app.send_order(Order(verb), app.get_screen("overview").query_one(CommandBar))
            row = len(text.shown) - 1
            if isinstance(app.screen, CommandDialog) and row < text.region.height:
                await pilot.click(text, offset=(text.shown[row].index("esc"), row))
            elif isinstance(app.screen, CommandDialog | SplitDialog):
                await pilot.press("escape")
            await until(pilot, lambda: isinstance(app.screen, OverviewScreen))

    await driven(source, play, read_only=True)
    assert source.commands == []


async def test_no_burst_of_keys_brings_it_down() -> None:
    """Keys faster than screens and dialogs can open and close, as a terminal without bracketed paste delivers them."""
    source = source_of(3)
    keys = [*"014bslcpxnegt?:uywoa/", "escape", "enter", "tab", "up", "down", "left", "right", "space", "backspace"]
    dice = random.Random(11)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        for _ in range(12):
            burst(app, *(dice.choice(keys) for _ in range(25)))
            await pilot.pause()
        burst(app, "escape", "escape", "escape")
        await pilot.pause()
        assert app.is_running

    await driven(source, play, read_only=True)
    assert source.commands == []


async def test_a_dialog_is_worked_by_the_mouse() -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("b")
        await pilot.pause()
        await pilot.click("#field-node")
        assert app.screen.values()["node"] == "torch-b"  # type: ignore[attr-defined]
        text = app.screen.query_one("#dialog-text", Lines)
        await pilot.click("#field-micro", offset=(1, 0))
        await pilot.press("end", "backspace", "4")
        await pilot.click(text, offset=(text.shown[-1].index("enter"), len(text.shown) - 1))
        await until(pilot, lambda: not isinstance(app.screen, CommandDialog))
        await until(pilot, lambda: "applied @ step 120" in hint(app))
        await pilot.press("x")
        await pilot.pause()
        text = app.screen.query_one("#dialog-text", Lines)
        await pilot.click(text, offset=(text.shown[-1].index("y/N") + 2, len(text.shown) - 1))
        await until(pilot, lambda: not isinstance(app.screen, CommandDialog))
        await pilot.press("x")
        await pilot.pause()
        text = app.screen.query_one("#dialog-text", Lines)
        await pilot.click(text, offset=(text.shown[-1].index("y/"), len(text.shown) - 1))
        await until(pilot, lambda: len(source.commands) == 2)

    await driven(source, play)
    assert [verb for verb, _, _ in source.commands] == ["resize-batch", "stop"]
    assert source.commands[0][1:][0] == {"micro": 4}


async def test_others_who_are_attached_are_shown() -> None:
    source = source_of(4)
    source.viewers = (m.Viewer(by="anna", since_at=0.0), m.Viewer(by="cron", since_at=1.0, read_only=True))

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await until(pilot, lambda: bool(app.live.viewers))
        app.paint()
        assert "3 attached: anna, cron and you" in body(app)
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: "and you" not in body(app))
        assert "ETA 1d" in body(app)

    await driven(source, play, size=(140, 40))
