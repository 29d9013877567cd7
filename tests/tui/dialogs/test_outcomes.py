"""Every dialog that orders something is closed by its outcome, which the bottom line then says."""

import asyncio
from collections.abc import Callable

import pytest
from tests.tui.support.alerted import CLOCK_ALERT
from tests.tui.support.driving import driven, hint, until
from tests.tui.support.recorded import source_of
from textual.pilot import Pilot

from trainctl.protocol.messages import verbs
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.commands import forms
from trainctl.tui.commands.command import Order
from trainctl.tui.dialogs.chart_picker import ChartPicker
from trainctl.tui.dialogs.command_dialog import BranchDialog, CommandDialog, OrderDialog, StartDialog
from trainctl.tui.dialogs.event_details import EventDetails
from trainctl.tui.dialogs.help import FirstKeysScreen, HelpScreen
from trainctl.tui.dialogs.popup import Chooser, Dialog, Popup
from trainctl.tui.dialogs.split_dialog import SplitDialog, dialog_of
from trainctl.tui.screens import base
from trainctl.tui.screens.alerts import WhyScreen
from trainctl.tui.screens.overview import OverviewScreen

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
