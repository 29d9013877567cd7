"""After an outage: history is there at once, what was lost is a gap, ages are true, and each line says how it is."""

import dataclasses

import msgspec
from tests.tui.support.driving import body, driven, until
from tests.tui.support.logs import logging_source
from tests.tui.support.recorded import CLOCK, NOW, committed, rank_step, run_view, snapshot, under_way
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.charts import plot as p
from trainctl.tui.charts.traces import Trace
from trainctl.tui.screens import node
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.text import styled_line as ln

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
    """What the restarted agent answers 40 s later, at step 140."""
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
