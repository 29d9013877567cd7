"""The dialog of the split, driven by keys and the mouse, from typing to applied."""

import msgspec
import pytest
from tests.tui.support.driving import burst, dialog_text, driven, hint, until
from tests.tui.support.recorded import run_view, source_of  # fmt: skip
from textual.pilot import Pilot

from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.widgets.line_view import Lines


async def test_the_split_is_moved_typed_and_sent() -> None:
    source = source_of(3)
    source.replies["rebalance"] = [
        {"state": "accepted"},
        {"state": "applied", "step": 120, "before": "torch-a=12 torch-b=10 mlx-c=2",
         "after": "torch-a=12 torch-b=11 mlx-c=1", "plan_version": 5},
    ]  # fmt: skip

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("down", "down", "s")
        dialog = app.screen
        assert isinstance(dialog, SplitDialog)
        assert dialog.split.shares == (12, 10, 2)
        await pilot.press("enter")
        assert source.commands == [], "nothing has changed"
        await pilot.press("right", "plus", "minus", "left")
        assert dialog.split.shares == (12, 10, 2)
        await pilot.press("2", "4")
        assert "torch-b can take at most 22 of 24" in dialog_text(app)
        await pilot.press("enter")
        assert source.commands == []
        await pilot.press("backspace", "backspace", "a")
        await until(pilot, lambda: dialog.split.shares == (12, 11, 1))
        assert "step 0.40 s → 0.32 s" in dialog_text(app)
        await pilot.press("u")
        assert dialog.split.shares == (12, 10, 2)
        await pilot.press("a")
        await until(pilot, lambda: dialog.split.shares == (12, 11, 1))
        await pilot.press("enter")
        await until(pilot, lambda: "applied @ step 120" in hint(app))
        assert "rebalance applied" in hint(app) and "torch-a=12 torch-b=11 mlx-c=1" in hint(app)

    await driven(source, play, (140, 40))
    (first,) = source.commands
    assert first[:2] == ("rebalance", {"shares": {"torch-a": 12, "torch-b": 11, "mlx-c": 1}})
    assert first[2].items() >= {"node": None, "run": "demo-20261120-142900", "if_plan": 4}.items()


async def test_the_split_is_clicked_refused_and_closed() -> None:
    source = source_of(3)
    source.replies["rebalance"] = [{"state": "rejected", "field": "if_plan", "reason": "the plan has moved on to v6"}]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s")
        text = app.screen.query_one("#dialog-text", Lines)
        await pilot.click(text, offset=(text.shown[2].index("+"), 2))
        assert isinstance(app.screen, SplitDialog)
        assert app.screen.split.chosen == 1
        assert sum(app.screen.split.shares) == 24
        assert app.screen.split.shares[1] == 11
        await pilot.press("enter")
        await until(pilot, lambda: "moved on to v6" in dialog_text(app))
        await pilot.press("u", "escape")
        assert isinstance(app.screen, OverviewScreen)

    await driven(source, play)


@pytest.mark.parametrize(
    ("keys", "shares", "chosen", "typed"),
    [
        ("down down 1 2 %", (11, 10, 3), 2, "12%"),
        ("2 5 % tab 9", (10, 9, 5), 1, "9"),
        ("j 9 backspace 8 k plus", (15, 8, 1), 0, ""),
    ],
)
async def test_keys_of_one_burst_act_on_the_node_that_was_chosen_before_them(
    keys: str, shares: tuple[int, ...], chosen: int, typed: str
) -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        burst(app, "s", *keys.split(" "))
        await until(pilot, lambda: isinstance(app.screen, SplitDialog))
        await pilot.pause()
        dialog = app.screen
        assert isinstance(dialog, SplitDialog)
        assert (dialog.split.shares, dialog.split.chosen, dialog.split.typed) == (shares, chosen, typed)
        burst(app, "enter", "enter", "j", "5")
        await until(pilot, lambda: dialog.progress is not None and dialog.progress.ended)
        assert dialog.split.shares == shares

    await driven(source, play)
    assert len(source.commands) == 1


async def test_a_split_whose_plan_has_moved_on_says_so_and_loads_the_new_one() -> None:
    source = source_of(3)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("s", "enter")
        dialog = app.screen
        assert isinstance(dialog, SplitDialog)
        assert "nothing to send: the plan already has this split" in dialog_text(app)
        await pilot.press("down", "5")
        view = run_view(3)
        ranks = tuple(msgspec.structs.replace(item, share=8) for item in view.ranks)
        source.more.put_nowait(msgspec.structs.replace(view, ranks=ranks, plan_version=6, seq=90))
        await until(pilot, lambda: "the plan is now v6" in dialog_text(app))
        await pilot.press("u")
        assert (dialog.split.shares, dialog.split.chosen, dialog.form.if_plan) == ((8, 8, 8), 1, 6)
        assert "now" not in dialog_text(app)

    await driven(source, play)
