"""The dialogs of verbs, driven by keys, from typing to the outcome that closes them."""

import asyncio
from collections.abc import Callable

import pytest
from tests.tui.support.alerted import CLOCK_ALERT
from tests.tui.support.driving import dialog_text, driven, hint, until
from tests.tui.support.recorded import resized, source_of
from textual.pilot import Pilot

from trainctl.protocol.messages import verbs
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.commands import forms
from trainctl.tui.commands.command import Order
from trainctl.tui.dialogs.chart_picker import ChartPicker
from trainctl.tui.dialogs.command_dialog import BranchDialog, CommandDialog, OrderDialog, StartDialog
from trainctl.tui.dialogs.help import FirstKeysScreen, HelpScreen
from trainctl.tui.dialogs.popup import Chooser, Dialog, Popup
from trainctl.tui.dialogs.split_dialog import SplitDialog, dialog_of
from trainctl.tui.dialogs.undo_picker import EventDetails
from trainctl.tui.screens import base
from trainctl.tui.screens.alerts import WhyScreen
from trainctl.tui.screens.overview import OverviewScreen


async def test_a_dialog_goes_from_typing_to_applied() -> None:
    source = source_of(1)
    source.gate, source.dry_runs = asyncio.Event(), resized

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("b", "0")
        assert "micro: must be a whole number of at least 1" in dialog_text(app)
        await pilot.press("enter")
        assert source.commands == []
        await pilot.press("backspace", "3", "4")
        await until(pilot, lambda: "34 is over atlas's share of 24 samples" in dialog_text(app))
        await pilot.press("backspace", "backspace", "4")
        await until(pilot, lambda: "8×3 → 4×6; step time isn't known yet; at step 120;" in dialog_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: "sent → accepted …" in dialog_text(app))
        source.gate.set()
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        await until(pilot, lambda: "applied @ step 120  micro 8 → micro 4" in hint(app))

    await driven(source, play)
    ((verb, args, options),) = source.commands
    assert (verb, args) == ("resize-batch", {"micro": 4})
    assert options.items() >= {"node": "atlas", "run": "stdlib-20261120-142900", "if_plan": 4}.items()


async def test_a_refusal_stays_readable() -> None:
    source = source_of(1)
    source.replies["set-lr"] = [{"state": "rejected", "field": "value", "reason": "plan has moved on to v6"}]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("l", *"1e-4", "tab", "right")
        await pilot.press("shift+tab", "enter")
        await until(pilot, lambda: "rejected: value: plan has moved on to v6" in dialog_text(app).replace("\n", " "))

    await driven(source, play)
    assert source.commands[0][1] == {"value": 1e-4, "schedule": "set"}


async def test_an_agent_that_does_not_answer_is_said_in_the_dialog() -> None:
    source = source_of(1)
    source.refuses = True

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("c", "enter")
        await until(pilot, lambda: "no answer" in dialog_text(app))

    await driven(source, play)


async def test_stop_wants_a_y() -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        for key in ("enter", "n", "escape"):
            await pilot.press("x")
            assert "stop it? y/N" in dialog_text(app)
            await pilot.press(key)
            assert isinstance(app.screen, OverviewScreen)
        assert source.commands == []
        await pilot.press("x", "y")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    assert source.commands[0][:2] == ("stop", {"checkpoint": True})


async def test_p_resumes_a_paused_run() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert "p resume" in hint(app)
        await pilot.press("p", "enter")
        await until(pilot, lambda: "applied" in hint(app))

    source = source_of(1, state="paused")
    await driven(source, play)
    assert source.commands[0][0] == "resume"


async def test_the_chosen_node_is_the_dialogs() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("down", "down", "down", "b")
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.values() == {"node": "forge", "micro": "13"}
        await pilot.press("shift+tab", "left")
        assert app.screen.values() == {"node": "mbp", "micro": "5"}

    await driven(source_of(4), play)


async def test_a_command_whose_dialog_was_closed_still_tells_its_end() -> None:
    source = source_of(1)
    source.gate = asyncio.Event()

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("c", "enter")
        await until(pilot, lambda: bool(source.commands))
        await pilot.press("escape")
        source.gate.set()
        await until(pilot, lambda: "applied @ step 120" in hint(app))
        await pilot.press("down")
        await until(pilot, lambda: "applied" not in hint(app))
        assert "c ckpt" in hint(app)

    await driven(source, play)


ORDER_NOTHING = {Chooser, EventDetails, FirstKeysScreen, HelpScreen, ChartPicker}
"""Dialogs that choose or show."""
SHARED = {Dialog, Popup, OrderDialog}
"""Arguments that the dialogs are made from."""


def verb_dialog(verb: str) -> Callable[[TrainctlApp], Dialog[None]]:
    return lambda app: dialog_of(forms.form(verb, app.shown), app.shown, None)


MAKERS: dict[str, tuple[str, Callable[[TrainctlApp], Dialog[None]]]] = {
    **{verb: (verb, verb_dialog(verb)) for verb in verbs.VERBS},
    "a run file": ("start-run", lambda app: StartDialog(forms.start_form())),
    "a branch": ("start-run", lambda app: BranchDialog("demo-20261120-142900")),
    "an alert": ("acknowledge", lambda app: WhyScreen(CLOCK_ALERT)),
}


def kinds(of: type[Dialog[None]] = Dialog) -> set[type[Dialog[None]]]:
    return {of}.union(*(kinds(kind) for kind in of.__subclasses__()))


def test_all_dialogs_are_tried() -> None:
    base.makers()
    assert kinds() - SHARED - ORDER_NOTHING == {CommandDialog, SplitDialog, StartDialog, BranchDialog, WhyScreen}


@pytest.mark.parametrize("name", MAKERS)
async def test_a_dialog_is_closed_by_its_outcome(name: str) -> None:
    """It stays while the command is on its way, and with the reason of one that is refused."""
    verb, make = MAKERS[name]
    source = source_of(3)
    source.replies[verb] = [{"state": "rejected", "reason": "not now"}]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        dialog = make(app)
        await app.push_screen(dialog)
        app.send_order(Order(verb), dialog)
        await until(pilot, lambda: dialog.progress is not None and dialog.progress.ended)
        assert app.screen is dialog
        source.replies[verb] = [{"state": "accepted"}, {"state": "applied", "step": 120}]
        source.gate = asyncio.Event()
        app.send_order(Order(verb), dialog)
        await until(pilot, lambda: dialog.progress is not None and dialog.progress.accepted)
        assert app.screen is dialog
        source.gate.set()
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        await until(pilot, lambda: f"{verb}" in hint(app) and "applied @ step 120" in hint(app))

    await driven(source, play)


async def test_the_command_line_is_closed_by_its_outcome_unless_the_next_command_is_typed() -> None:
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("colon", *"pause", "enter")
        await until(pilot, lambda: "pause applied" in hint(app) and app.focused is None)
        source.gate = asyncio.Event()
        await pilot.press("colon", *"resume", "enter", *"note")
        source.gate.set()
        await until(pilot, lambda: len(source.commands) == 2)
        assert app.focused is not None

    await driven(source, play)
