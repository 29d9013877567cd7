"""Events chosen, opened, sorted, and undone by keys and mouse."""

import dataclasses

import msgspec
import numpy as np
import pytest
from tests.tui.support.driving import body, dialog_text, hint, running, until
from tests.tui.support.recorded import (
    BOOT,
    CLOCK,
    CONNECTED,
    NOW,
    Recorded,
    events,
    run_view,
    snapshot,
    source_of,
    under_way,
)
from tests.tui.support.states import ALONE, GROUP, SHRUNK

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import (
    MicroBatchChanged,
    NoteWritten,
    SharesChanged,
)
from trainctl.tui.charts import marks as marks_of
from trainctl.tui.commands import undo
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.popup import Chooser
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.dialogs.undo_picker import EventDetails
from trainctl.tui.screens import events_table
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.state.run_events import Change
from trainctl.tui.text import styled_line as ln


async def test_undo_is_offered_and_clicked_where_the_chosen_event_has_an_inverse() -> None:
    async with running(source_of(4)) as (pilot, app):
        await pilot.press("4")
        screen = app.screen
        assert isinstance(screen, EventsScreen)
        await until(pilot, lambda: len(screen.rows) == 6)
        for number in range(6):
            await pilot.press("home", *["down"] * number)
            assert screen.chosen is not None
            can = isinstance(screen.undoing(screen.chosen), undo.Inverse)
            assert can == (screen.chosen.verb in ("set-lr", "resize-batch"))
            await until(pilot, lambda can=can: ("⏎ details u undo" in hint(app)) == can)  # type: ignore[misc]
            rows = body(app).splitlines()
            assert [row for row in rows if "u undo" in row] == ([rows[3 + number]] if can else [])
        await pilot.press("home", "down", "down", "down")
        await until(pilot, lambda: "u undo" in body(app))
        row, text = next((at, text) for at, text in enumerate(body(app).splitlines()) if "u undo" in text)
        await pilot.click("#body", offset=(text.index("u undo"), row))
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))


async def test_events_are_chosen_opened_sorted_and_undone() -> None:
    source = source_of(4)

    async with running(source) as (pilot, app):
        await pilot.press("4")
        screen = app.screen
        assert isinstance(screen, EventsScreen)
        await until(pilot, lambda: len(screen.rows) == 6)
        await pilot.press("enter")
        assert "none: it isn't a change" in dialog_text(app)
        await pilot.press("escape", "u")
        assert any("can't undo" in str(item.message) for item in app._notifications)
        await pilot.press("j", "j", "j", "k", "down", "enter")
        assert isinstance(app.screen, EventDetails)
        for words in ("Friday 20 November 2026, 12:01:05", "resize-batch", "18,170", "tokens/s", "medians of 20 and 20",
                      "resize-batch micro=4 --node studio"):  # fmt: skip
            assert words in dialog_text(app)
        await pilot.press("u")
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.values() == {"node": "studio", "micro": "4"}
        assert "undoes micro-batch: studio 4 → 8 @18,170" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: app.screen is screen)
        verb, args, options = source.commands[0]
        assert (verb, args, options["node"], options["if_plan"]) == ("resize-batch", {"micro": 4}, "studio", 4)
        undoing = m.Event(
            id=7, at=NOW, severity="info", by="bo",
            data=MicroBatchChanged(before=(("studio", 8),), after=(("studio", 4),)),
            run=app.shown.run.run if app.shown.run else "", step=18_241, command=options["id"],
            undoes=options["undoes"], verb="resize-batch", outcome="applied", boot=BOOT, seq=50,
        )  # fmt: skip
        source.more.put_nowait(undoing)
        await until(pilot, lambda: "undoes @18,170" in body(app))
        await pilot.press("slash", *"is:undone", "enter")
        assert [row.event.id for row in screen.rows] == [3]
        await pilot.press("u")
        assert any("bo already undid it" in str(item.message) for item in app._notifications)
        await pilot.press("escape", "o", "o", "O", "home")
        assert screen.order.field == "by"
        assert [row.event.by for row in screen.rows] == ["bo", "auto", "auto", "auto", "auto", "anna", "anna"]
        await pilot.press("end", "pageup", "pagedown")
        await pilot.click("#body", offset=(20, 4))
        assert screen.cursor == 1


async def test_old_effects_are_asked_of_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    source = Recorded([CONNECTED, snapshot(run_view(4, step=18_240, steps=60_000))])
    data = SharesChanged({"studio": 20, "mbp": 5}, {"studio": 16, "mbp": 9})
    applied = {"step": 9_000, "verb": "rebalance", "outcome": "applied", "command": "z"}

    def events(asked: m.EventsRequest) -> m.Events:
        old = m.Event(id=9, at=NOW - 12000, severity="info", by="anna", data=data, run=asked.run, **applied)
        return m.Events(rid="r", run=asked.run, events=(old,), more=False)

    monkeypatch.setattr(source, "events", events)

    async with running(source) as (pilot, _app):
        await pilot.press("4")
        await until(pilot, lambda: (8_980, 9_019) in [(ask.first_step, ask.last_step) for ask in source.asked])


async def test_u_on_the_overview_lists_the_changes_that_can_be_undone() -> None:
    async with running(source_of(4)) as (pilot, app):
        await pilot.press("u")
        assert isinstance(app.screen, Chooser)
        assert "1 14:20 anna learning rate: 1.8e-4→1.62e-4 scaled @18,210;" in dialog_text(app)
        await pilot.press("2")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert app.screen.values() == {"node": "studio", "micro": "4"}  # type: ignore[attr-defined]
        await pilot.press("escape", "u", "down", "up", "enter")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert app.screen.values() == {"value": "0.00018", "schedule": "scale"}  # type: ignore[attr-defined]
        await pilot.press("escape", "u", "escape")
        assert isinstance(app.screen, OverviewScreen)


async def test_a_split_is_undone_in_the_split_dialog() -> None:
    source = Recorded(under_way(run_view(3)))
    split = m.Event(
        id=30, at=NOW - 3, severity="info", by="anna", verb="rebalance", step=110, command="q", outcome="applied",
        data=SharesChanged({"torch-a": 8, "torch-b": 12, "mlx-c": 4}, {"torch-a": 12, "torch-b": 10, "mlx-c": 2}),
        run=run_view(3).run, boot=BOOT, seq=900,
    )  # fmt: skip
    source.messages.append(split)

    async with running(source) as (pilot, app):
        await until(pilot, lambda: split in app.live.events)
        await pilot.press("u", "1")
        await until(pilot, lambda: isinstance(app.screen, SplitDialog))
        assert isinstance(app.screen, SplitDialog)
        assert app.screen.split.shares == (8, 12, 4)
        assert "undoes rebalance" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))
    verb, args, options = source.commands[0]
    assert (verb, args) == ("rebalance", {"shares": {"torch-a": 8, "torch-b": 12, "mlx-c": 4}})
    assert options["undoes"] == "q"


def test_an_events_text_cannot_drive_the_terminal() -> None:
    bad = msgspec.structs.replace(events(run_view(1))[0], data=NoteWritten("\x1b[2Jgone\x07"), by="\x1b]0;x")
    assert "\x1b" not in ln.plain(events_table.event_line(bad, ALONE, CLOCK, 80))


def test_an_effect_needs_steps_on_both_sides() -> None:
    resized = events(run_view(1))[2]
    near = msgspec.structs.replace(resized, step=117)
    assert events_table.effect(ALONE, near) is None
    change = events_table.effect(ALONE, resized)
    assert change is not None
    assert abs(change) < 0.1


def test_a_neighbour_s_effect_is_not_credited_and_no_change_has_none() -> None:
    state = GROUP
    window = state.lately("tokens_per_second")
    rates = dataclasses.replace(window, last=np.where(window.first < 100, 100.0, 200.0))
    state = msgspec.structs.replace(state, recent={**state.recent, ("tokens_per_second", None): rates})

    def rebalance(number: int, step: int, before: int = 1, after: int = 2) -> m.Event:
        return m.Event(
            id=number, at=NOW, severity="info", by="anna", data=SharesChanged({"a": before}, {"a": after}), step=step,
            run=run_view(3).run, verb="rebalance", outcome="applied",
        )  # fmt: skip

    first, second = rebalance(21, 92), rebalance(22, 100)
    both = msgspec.structs.replace(state, events=(first, second))
    assert events_table.effect(both, second) == pytest.approx(1.0)
    assert events_table.effect(both, first) == pytest.approx(0.0)
    assert events_table.effect(msgspec.structs.replace(both, events=(first, rebalance(23, 96), second)), first) is None
    same = rebalance(24, 100, 2, 2)
    assert events_table.effect(both, same) is None
    assert marks_of.numbered(msgspec.structs.replace(both, events=(first, same))) == {21: "21"}


def test_a_mark_keeps_its_number_when_more_commands_come() -> None:
    """A question for what one did gets the same answer before and after the next."""
    first = next(event for event in ALONE.run_events if event.verb == "resize-batch")
    more = [msgspec.structs.replace(first, id=100 + index, step=100 + index) for index in range(8)]
    before = marks_of.numbered(ALONE)
    after = marks_of.numbered(msgspec.structs.replace(ALONE, events=(*ALONE.run_events, *more)))
    assert len(after) == marks_of.MAX_MARKS
    assert len(set(after.values())) == len(after)
    kept = before.keys() & after.keys()
    assert kept and all(after[event] == before[event] for event in kept)


def test_the_charts_mark_a_rank_that_was_lost_and_one_that_came_back() -> None:
    marks = [mark for mark in marks_of.of_run(SHRUNK) if isinstance(mark, Change)]
    assert marks == [Change(70, "g1.3"), Change(78, "g1.4"), Change(116, "g1.5")]
