"""The dialogs of verbs, driven by keys, from typing to applied."""

import asyncio

from tests.tui.support.driving import dialog_text, driven, hint, until
from tests.tui.support.recorded import resized, source_of
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
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
