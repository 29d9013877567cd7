"""The shell around the screens, and outages: read-only, the mouse, viewers, gaps and true ages."""

import dataclasses
import random

import msgspec
from tests.tui.support.driving import body, burst, dialog_text, driven, hint, until
from tests.tui.support.logs import logging_source
from tests.tui.support.recorded import CLOCK, NOW, committed, rank_step, run_view, snapshot, source_of, under_way
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages import verbs
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.charts import plot as p
from trainctl.tui.charts.traces import Trace
from trainctl.tui.commands.command import Order
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.screens import node
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.text import styled_line as ln
from trainctl.tui.widgets.command_bar import CommandBar
from trainctl.tui.widgets.line_view import Lines

LOST = range(60, 90)
"""Steps of which the record has nothing: it couldn't be written."""
OUTAGE_SECONDS = 40.0
LATER = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + OUTAGE_SECONDS, at_wall=NOW + OUTAGE_SECONDS)


def without(series: m.Series) -> m.Series:
    """The series without the lost steps."""
    kept = [place for place, step in enumerate(series.steps) if step not in LOST]
    columns = {
        name: tuple(getattr(series, name)[place] for place in kept)
        for name in ("steps", "minimum", "maximum", "mean", "last")
    }
    return msgspec.structs.replace(series, **columns)


def opened_again(boot: str = "boot-2") -> m.Snapshot:
    """Return what the restarted agent answers 40 s later, at step 140."""
    made = snapshot(run_view(3, step=140))
    return msgspec.structs.replace(
        made, boot=boot, at=NOW + OUTAGE_SECONDS, series=tuple(map(without, made.series)),
        last_step=msgspec.structs.replace(made.last_step, committed_at=NOW + OUTAGE_SECONDS - 3),
    )  # fmt: skip


def played(*more: md.Incoming) -> md.ViewState:
    state = md.ViewState()
    for message in under_way(run_view(3)):
        state = reducer.apply(state, message, CLOCK.at_monotonic)
    for message in more:
        state = reducer.apply(state, message, LATER.at_monotonic)
    return state


def test_history_is_there_at_once_and_what_was_lost_is_a_gap() -> None:
    state = played(Connection("silent", CLOCK.at_monotonic + 4, "no message"), opened_again())
    window = state.window("loss")
    assert set(window.first.tolist()) == set(range(1, 141)) - set(LOST)
    assert state.lately("busy_seconds", 1).first.tolist() == window.first.tolist()
    body, _, _ = p.draw_panel(p.Plot("loss", (Trace(window, "", "series0"),), 1, 150), 80, 10)
    columns = ["".join(cells).strip() for cells in zip(*(ln.plain(row) for row in body[:-1]), strict=True)]
    runs = "".join("x" if cells else " " for cells in columns).strip().split("x")
    assert max(map(len, runs)) >= 74 * len(LOST) // 150 - 2, "the lost steps' columns are empty"


def test_messages_lost_under_way_leave_their_steps_out() -> None:
    view = run_view(3)
    missed = [committed(view, 125, seq=500), *(rank_step(view, 125, rank, seq=501 + rank) for rank in range(3))]
    state = played(*missed)
    assert state.lately("loss").first.tolist()[-2:] == [118, 125]
    assert [lap.step for lap in step_phases.laps(state, step_phases.RecordedPhases(), 0)][-2:] == [118, 125]
    drawn = node.phase_columns(step_phases.laps(state, step_phases.RecordedPhases(), 0), 125, 60, 8)
    letters = ln.plain(drawn[-2])[7:]
    place = letters.rstrip().rindex(" ")
    assert letters[place - 5 : place + 1] == " " * 6, "six steps that aren't known"


def test_ages_are_by_the_agent_s_own_clock_and_begin_again() -> None:
    silent = played(Connection("silent", CLOCK.at_monotonic + 4, "no message"))
    assert silent.silent_for(LATER.at_monotonic) == OUTAGE_SECONDS
    assert all(row.old for row in rank_rows.rows(silent, LATER))
    back = played(Connection("connected", LATER.at_monotonic), opened_again())
    assert back.silent_for(LATER.at_monotonic) is None
    rows = rank_rows.rows(back, LATER)
    assert [round(row.age or 0) for row in rows] == [3, 3, 3] and not any(row.old for row in rows)
    assert back.heartbeat is None, "of the agent's earlier life"


async def test_the_screens_say_so_and_are_whole_again() -> None:
    source = logging_source()
    source.messages = list(under_way(run_view(3)))

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("2")
        await until(pilot, lambda: "mean of 16 steps" in body(app))
        app.clock = app.feed._clock = LATER
        source.more.put_nowait(Connection("silent", CLOCK.at_monotonic + 4, "no message"))
        await until(pilot, lambda: app.live.connection.state == "silent")
        app.paint()
        assert "agent silent 40s" in body(app) and "no message" in body(app)
        known = len(app.screen.past.laps[0])  # type: ignore[attr-defined]
        source.more.put_nowait(Connection("connected", LATER.at_monotonic))
        source.more.put_nowait(opened_again())
        source.messages = [opened_again()]  # what the history is asked of from here on
        await until(pilot, lambda: len(app.screen.past.laps[0]) > known)  # type: ignore[attr-defined]
        assert "agent connected" in body(app) and "silent" not in body(app).split("\n", 1)[1]
        await pilot.press("1")
        assert "140/150" in body(app) and "agent silent" not in body(app)

    await driven(source, play)


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
