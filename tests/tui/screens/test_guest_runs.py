"""A run that says little of itself: screens and dialogs show `n/a` for what it does not say, and invent nothing."""

import pytest
from tests.tui.support.driving import body, dialog_text, driven, until
from tests.tui.support.guests import GuestSource, part_of, step_of, view_of
from tests.tui.support.recorded import committed, rank_step, run_view, snapshot
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.cli import tables

SCREENS = ("0", "1", "2", "3", "4", "5", "a")
REFUSED = {
    "b": "a different program trains this run",
    "s": "a different program trains this run",
    "l": "its optimizer has no hooks",
}


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)])
async def test_every_screen_and_dialog_opens(size: tuple[int, int]) -> None:
    source = GuestSource()

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        for key in SCREENS:
            await pilot.press("escape", key)
            await pilot.pause()
            assert "118/n/a" in body(app) or key in "0", key
        await pilot.press("1")
        for key, why in REFUSED.items():
            await pilot.press(key)
            await until(pilot, lambda why=why: why in dialog_text(app))  # type: ignore[misc]
            await pilot.press("enter", "escape")
        await pilot.press("p", "enter")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play, size)
    assert [verb for verb, *_ in source.commands] == ["pause"]


async def test_what_is_not_said_is_not_available() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        shown = body(app)
        for words in ("118/n/a", "ETA n/a", "loss n/a", "lr n/a", "|g| n/a", "G n/a", "epoch n/a"):
            assert words in shown, words
        assert "0%" not in shown

    await driven(GuestSource(), play, (120, 40))


def test_the_command_line_says_so_too() -> None:
    whole = run_view(3)
    shown = snapshot(whole)
    view, last, part = view_of(whole), step_of(committed(whole, 118)), part_of(rank_step(whole, 118, 0))
    replaced = type(shown)(
        rid="r", boot="b", seq=0, at=0.0, node=shown.node, run=view, last_step=last, rank_steps=(part,), events=(),
        series=(),
    )  # fmt: skip
    text = tables.status_text(replaced)
    for words in ("118/n/a (n/a)", "global batch n/a", "learning rate n/a", "loss n/a"):
        assert words in text, words
    assert "loss n/a  |g| n/a  lr n/a" in tables.step_line(last)
