"""The program driven by keys: the command line, every key of every screen, the first start, and how it is left."""

import itertools
import signal
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests import waiting
from tests.tui.support.alerted import CLOCK_ALERT, alerted
from tests.tui.support.driving import body, burst, driven, hint, until
from tests.tui.support.recorded import CLOCK, committed, resized, run_view, source_of  # fmt: skip
from tests.waiting import HANG_SECONDS
from textual import events
from textual._xterm_parser import XTermParser
from textual.binding import Binding
from textual.dom import DOMNode
from textual.pilot import Pilot

from trainctl.protocol.messages import DryRun
from trainctl.tui.app import keymap, launch
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.app.keymap import EVERYWHERE
from trainctl.tui.app.launch import farewell
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.help import FirstKeysScreen
from trainctl.tui.dialogs.popup import Dialog
from trainctl.tui.screens import base
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.logs import LogScreen
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


async def test_a_new_lead_is_judged_by_agents() -> None:
    source, refused = source_of(1), "atlas already leads stdlib-20261120-142900"
    source.dry_runs = lambda asked: DryRun(rid="r", run="", verb=asked.verb, refused=refused, field="node")

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("colon", *"promote --node atlas")
        await until(pilot, lambda: f"node: {refused}" in hint(app))

    await driven(source, play)


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


LEAVING = {"detach", "leave"}


class Program(TrainctlApp):
    """Notes each action that a key runs."""

    actions: ClassVar[list[str]] = []

    async def run_action(self, action: Any, *args: Any, **options: Any) -> bool:
        self.actions.append(str(action))
        return await super().run_action(action, *args, **options)


def own_bindings(kind: type[DOMNode]) -> list[Binding]:
    """Return what a screen declares or inherits, one for each key."""
    declared = [item for part in kind.__mro__ for item in part.__dict__.get("BINDINGS", ())
                if issubclass(part, DOMNode) and part.__module__.startswith("trainctl.")]  # fmt: skip
    found: dict[str, Binding] = {}
    for binding in itertools.chain.from_iterable(Binding.make_bindings([item]) for item in declared):
        found.setdefault(binding.key, binding)
    return list(found.values())


async def back_to(pilot: Pilot[int], app: TrainctlApp, name: str) -> None:
    """Without windows over it."""
    while len(app.screen_stack) > 2:
        app.pop_screen()
        await pilot.pause()
    app.screen.set_focus(None)
    if app.screen.name == name:
        return
    app.action_show(name)
    await until(pilot, lambda: app.screen is app.get_screen(name) and app.screen.is_mounted)


async def pressed(pilot: Pilot[int], app: Any, binding: Binding) -> None:
    app.actions.clear()
    await pilot.press(binding.key)
    await pilot.pause()
    assert any(binding.action == action for action in app.actions), (
        f"{binding.key} on {type(app.screen).__name__} is {binding.action}, and ran {app.actions or 'nothing'}"
    )


@asynccontextmanager
async def running(pictures: Path) -> AsyncIterator[tuple[Pilot[int], Program]]:
    source = alerted(CLOCK_ALERT)
    app = Program(lambda: source, clock=CLOCK, in_ascii=False, theme="night", pictures=pictures)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.live.heard_at is not None)
        yield pilot, app


@pytest.mark.parametrize("name", base.KINDS)
async def test_of_a_screen(name: str, tmp_path: Path) -> None:
    async with running(tmp_path) as (pilot, app):
        await back_to(pilot, app, name)
        for binding in own_bindings(type(app.screen)):
            await back_to(pilot, app, name)
            if isinstance(app.screen, LogScreen) and not app.screen.view.query.text:
                await pilot.press("slash", "e", "enter")  # keys of a search need one
            await pressed(pilot, app, binding)


async def test_of_the_program(tmp_path: Path) -> None:
    async with running(tmp_path) as (pilot, app):
        *others, detach = sorted(Binding.make_bindings(EVERYWHERE), key=lambda item: item.action == "detach")
        for binding in (*(item for item in others if item.action not in LEAVING), detach):
            await back_to(pilot, app, "overview")
            await pressed(pilot, app, binding)
    assert app.return_code == 0


def test_only_the_first_start_in_a_folder_that_can_be_written_is_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "state"))
    assert [launch.claim_first_start() for _ in range(3)] == [True, False, False]
    (tmp_path / "file").write_text("a file", "utf-8")
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path / "file"))
    assert not launch.claim_first_start()


@pytest.mark.parametrize(("key", "screen"), [("escape", "overview"), ("q", "overview"), ("3", "charts")])
async def test_a_key_closes_them_and_one_that_they_name_acts(key: str, screen: str) -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert isinstance(app.screen, FirstKeysScreen)
        await pilot.press(key)
        assert app.screen.name == screen and app.is_running

    await driven(source_of(4), play, first_keys=lambda: keymap.first_keys({}))


async def test_a_key_right_after_escape_acts_on_the_screen_below() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        parser = XTermParser()
        for message in [*parser.feed("\x1bb"), *waiting.until(lambda: list(parser.tick()), 10, "the keys")]:
            app.post_message(message)
        await pilot.pause()
        await pilot.pause()
        assert isinstance(app.screen, Dialog) and not isinstance(app.screen, FirstKeysScreen), app.screen

    await driven(source_of(4), play, first_keys=lambda: keymap.first_keys({}))
