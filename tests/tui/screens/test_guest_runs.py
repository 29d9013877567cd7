"""Runs unlike the usual: one that says little of itself, of which `n/a` is shown and nothing invented, and one that
counts pairs instead of tokens."""

import msgspec
import pytest
from tests.tui.support import guests
from tests.tui.support.driving import body, dialog_text, running, until
from tests.tui.support.guests import GuestSource, part_of, step_of, view_of
from tests.tui.support.recorded import committed, rank_step, run_view, snapshot, source_of

from trainctl.protocol import messages as m
from trainctl.tui.charts import metrics
from trainctl.tui.cli import tables

SCREENS = ("0", "1", "2", "3", "4", "5", "a")
REFUSED = {
    "b": "a different program trains this run",
    "s": "a different program trains this run",
    "l": "its optimizer has no hooks",
}


@pytest.mark.parametrize("size", [(80, 24), (200, 60)])
async def test_every_screen_and_dialog_opens(size: tuple[int, int]) -> None:
    source = GuestSource()

    async with running(source, size) as (pilot, app):
        for key in SCREENS:
            await pilot.press("escape", key)
            await pilot.pause()
            assert "118/n/a" in body(app) or key in "0", key
        await pilot.press("1")
        for words in ("118/n/a", "ETA n/a", "loss n/a", "lr n/a", "|g| n/a"):
            assert words in body(app), words
        assert "0%" not in body(app)
        for key, why in REFUSED.items():
            await pilot.press(key)
            await until(pilot, lambda why=why: why in dialog_text(app))  # type: ignore[misc]
            await pilot.press("enter", "escape")
        await pilot.press("p", "enter")
        await until(pilot, lambda: bool(source.commands))
    assert [verb for verb, *_ in source.commands] == ["pause"]


async def test_a_verb_that_the_loop_offers_is_sent_and_depends_on_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "OFFERS", (("set-lr", ""),))
    source = GuestSource()
    async with running(source, (120, 40)) as (pilot, app):
        await pilot.press("l", "0", ".", "1")
        await pilot.pause()
        assert "refused if the plan changes" not in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))
    ((verb, args, options),) = source.commands
    assert (verb, args["value"], options["if_plan"]) == ("set-lr", 0.1, None)


def test_the_command_line_says_so_too() -> None:
    whole = run_view(3)
    last, parts = step_of(committed(whole, 118)), (part_of(rank_step(whole, 118, 0)),)
    guest = {"run": view_of(whole), "last_step": last, "rank_steps": parts, "events": (), "series": ()}
    text = tables.status_text(msgspec.structs.replace(snapshot(whole), **guest))
    for words in ("118/n/a (n/a)", "global batch n/a", "learning rate n/a", "loss n/a"):
        assert words in text, words
    assert "loss n/a  |g| n/a  lr n/a" in tables.step_line(last)


def test_a_loss_without_a_unit_has_no_empty_parentheses() -> None:
    run = msgspec.structs.replace(view_of(run_view(3)), loss_unit="")
    titles = [metrics.title(chart, str, run) for chart in metrics.charts_of(metrics.DEFAULT_CHARTS, run)]
    assert titles[0] == "loss, eval loss"


# ---------------------------------------------------------------- a run whose loss is divided by pairs

PAIRS = msgspec.structs.replace(run_view(3), weight_unit="pairs", loss_unit="nats per pair")
LAST = msgspec.structs.replace(committed(PAIRS, PAIRS.step), weight=24.0, weight_total=2400.0, seconds_total=60.0)


async def test_head_and_charts_have_the_run_s_own_unit() -> None:
    shown = msgspec.structs.replace(snapshot(PAIRS), last_step=LAST)
    source = source_of(3)
    source.messages = [shown if isinstance(item, m.Snapshot) else item for item in source.messages]
    async with running(source, (120, 40)) as (pilot, app):
        assert " 60 pairs/s" in body(app) and "average 40 pairs/s" in body(app)
        assert "tok/s  eff" not in body(app) and " ppl " not in body(app)
        await pilot.press("3")
        await pilot.pause()
        assert "─ pairs/s ─" in body(app) and "─ tokens/s ─" not in body(app)
    charts = metrics.charts_of(metrics.DEFAULT_CHARTS, PAIRS)
    titles = [metrics.title(chart, str, PAIRS) for chart in charts]
    assert titles[0] == "loss (nats per pair), eval loss (nats per pair)" and titles[2] == "pairs/s"
    assert metrics.charts_of(charts, run_view(3)) == metrics.DEFAULT_CHARTS


def test_the_command_line_has_the_run_s_own_unit() -> None:
    text = tables.status_text(msgspec.structs.replace(snapshot(PAIRS), last_step=LAST))
    assert "\npasses     a step accumulates gradients over passes: torch-a 2 of 8, torch-b 2 of 8" in text
    assert " per pair" in text and "sample" not in text
    assert "0.40 s a step  60 pairs/s" in text and "average 40 pairs/s" in text
    assert tables.step_line(LAST, PAIRS).endswith("60 pairs/s")
    assert tables.step_line(LAST).endswith("7,620 tok/s, 60 samples/s")
