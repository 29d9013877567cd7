"""The program driven by keys: the command line, from typing to applied, new steps, and how it is left."""

import signal
import threading

import msgspec
import pytest
from tests.tui.support.driving import body, burst, driven, hint, until
from tests.tui.support.recorded import committed, resized, run_view, source_of  # fmt: skip
from tests.waiting import HANG_SECONDS
from textual import events
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.launch import farewell
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.widgets.command_bar import CommandBar
from trainctl.tui.widgets.line_view import Lines


async def test_the_command_line_checks_previews_sends_and_reports() -> None:
    source = source_of(1)
    source.dry_runs = resized

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("colon", *"resize-batch micro=0")
        assert "micro: must be a whole number of at least 1" in hint(app)
        await pilot.press("enter")
        assert source.commands == []
        await pilot.press("backspace", "6")
        await until(pilot, lambda: "8×3 → 6×4; step time isn't known yet" in hint(app))
        await pilot.press("enter")
        await until(pilot, lambda: "applied @ step 120" in hint(app))
        burst(app, "colon", *"pause", "enter")
        await until(pilot, lambda: len(source.commands) == 2)
        await pilot.press("escape")
        assert not app.screen.query_one(CommandBar).open
        await pilot.press("colon", "enter")
        assert not app.screen.query_one(CommandBar).open

    await driven(source, play)
    ((verb, args, options), (second, _, _)) = source.commands
    assert (verb, args, second) == ("resize-batch", {"micro": 6}, "pause")
    assert options.items() >= {"node": None, "run": "stdlib-20261120-142900", "if_plan": None}.items()


async def test_new_steps_reach_the_screen_and_a_dialog_keeps_its_plan() -> None:
    source = source_of(1)
    view = run_view(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        source.more.put_nowait(committed(view, 119, seq=1))
        await until(pilot, lambda: "119/150" in body(app))
        await pilot.press("b")
        source.more.put_nowait(msgspec.structs.replace(committed(view, 120, seq=2), plan_version=9))
        under = app.screen_stack[-2].query_one("#body", Lines)
        await until(pilot, lambda: "120/150" in under.shown[0])
        await pilot.press("4", "enter")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    assert source.commands[0][2]["if_plan"] == 4


async def test_escape_and_a_key_close_behind_it_are_two_keys() -> None:
    """A terminal can't tell them from alt and the key: a dialog left with both would stay open, and the key be lost."""

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("c")
        assert isinstance(app.screen, CommandDialog)
        app.post_message(events.Key("alt+q", "q"))
        await until(pilot, lambda: app.return_code is not None)

    app = await driven(source_of(1), play)
    assert app.return_code == 0


async def test_a_burst_of_keys_lands_where_the_first_one_led() -> None:
    """All of it in one packet, as over a slow line: none of the letters may act as a key of its own."""
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, "b", "4", "enter")
        await until(pilot, lambda: len(source.commands) == 1)
        await pilot.press("escape")
        burst(app, "colon", *"note text=explain", "enter")
        await until(pilot, lambda: len(source.commands) == 2)
        await pilot.press("escape", "4")
        burst(app, "slash", *"anna")
        await until(pilot, lambda: "of 2" in body(app))
        assert isinstance(app.screen, EventsScreen)

    await driven(source, play)
    assert [command[:2] for command in source.commands] == [
        ("resize-batch", {"micro": 4}),
        ("note", {"text": "explain"}),
    ]


@pytest.mark.parametrize("key", ["q", "ctrl+c"])
async def test_detach_leaves_with_status_0_and_says_the_run_goes_on(key: str) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press(key)

    app = await driven(source_of(1), play)
    assert app.return_code == 0
    said = farewell(app.live, "tcp://127.0.0.1:7474")
    assert "stdlib (running) continues at step 118 of 150" in said
    assert "trainctl attach --connect tcp://127.0.0.1:7474" in said


async def test_a_hangup_ends_it() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        signal.raise_signal(signal.SIGHUP)
        await until(pilot, lambda: app.return_code is not None)

    app = await driven(source_of(1), play)
    assert app.return_code == 0


async def test_a_hangup_is_noticed_while_a_dead_terminal_takes_nothing() -> None:
    """Textual's loop then waits for ever for room in its queue of what is drawn."""

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        main = threading.main_thread().ident or 0
        threading.Thread(target=signal.pthread_kill, args=(main, signal.SIGHUP)).start()
        assert app.hung_up.wait(HANG_SECONDS)  # as there: in the loop's own thread

    await driven(source_of(1), play)
