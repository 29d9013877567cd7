"""The Overview's head, charts and events as lines: nothing unknown is shown as a number."""

import dataclasses
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.tui.support.recorded import (
    CLOCK,
    NOW,
    host,
)  # fmt: skip
from tests.tui.support.states import ALONE, FLEET, GROUP, MIXED, NOTHING, attached

from trainctl.protocol import messages as m
from trainctl.protocol.client.client import Connection
from trainctl.tui.screens import base, fleet_table, header, overview
from trainctl.tui.state import reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import styled_line as ln


def texts(made: list[ln.Line]) -> list[str]:
    return [ln.plain(pieces) for pieces in made]


def page(*given: Any, **options: Any) -> list[ln.Line]:
    return [pieces for part in overview.parts(*given, **options) for pieces in part]


def test_a_wide_head_has_the_best_and_the_worst_case_beside_the_eta() -> None:
    assert ALONE.last_step is not None
    left = {"time_left_seconds": 3600.0, "time_left_best_seconds": 3300.0, "time_left_worst_seconds": 4500.0}
    last = msgspec.structs.replace(ALONE.last_step.value, values=left)
    state = msgspec.structs.replace(ALONE, last_step=md.Seen(last, CLOCK.at_monotonic))
    assert "ETA 1h 00m, 15:31 (55m 00s to 1h 15m)" in texts(header.lines(state, CLOCK, 120, rows=2))[0]
    assert "ETA 1h 00m" in (narrow := texts(header.lines(state, CLOCK, 80, rows=2))[0])
    assert " to " not in narrow


def test_the_loss_in_the_head_is_the_mean_of_sixteen_steps_unless_the_last_is_no_number() -> None:
    def head(*losses: float) -> str:
        state = ALONE
        assert state.last_step is not None
        for number, loss in enumerate(losses, 119):
            step = msgspec.structs.replace(
                state.last_step.value, step=number, loss=loss, boot=state.boot, seq=state.seq + 1
            )
            state = reducer.apply(state, step, CLOCK.at_monotonic)
        return texts(header.lines(state, CLOCK, 80, rows=2))[1]

    assert "loss 2.500 " in head(*[2.0, 3.0] * 8)
    assert "loss 3.000 " in head(*[9.0] * 4, *[2.0, 4.0] * 8)
    assert "loss nan" in head(*[2.0] * 16, math.nan)


def test_another_node_s_agent_is_named_when_it_is_not_heard() -> None:
    state = reducer.apply_other(FLEET, "mbp", Connection("connected", CLOCK.at_monotonic), CLOCK.at_monotonic)
    state = reducer.apply_other(state, "mbp", host("mbp"), CLOCK.at_monotonic)
    assert "silent" not in texts(header.lines(state, CLOCK, 80, rows=2))[0]
    later = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + 40)
    lost = reducer.apply_other(
        state, "mbp", Connection("silent", CLOCK.at_monotonic + 4, "no message"), CLOCK.at_monotonic
    )
    beat = m.Heartbeat(node="studio", at=NOW, step_age_seconds=1, loop_lag_seconds=0, boot=FLEET.boot, seq=FLEET.seq)
    lost = reducer.apply(lost, beat, later.at_monotonic)
    for columns in (80, 120):
        assert "mbp silent 40s" in texts(header.lines(lost, later, columns, rows=2))[0]
    row = texts(fleet_table.lines(lost, later, 80, total=False))[2]
    assert row.split()[-2] == "n/a", "a reading that old says nothing, and is no zero"
    assert "silent 40s" in texts(fleet_table.lines(lost, later, 160, total=False))[2], "so is its link"


@pytest.mark.parametrize("columns", [80, 120])
def test_while_the_lead_s_agent_is_silent_the_run_is_not_shown_as_running(columns: int) -> None:
    def head(state: md.ViewState, seconds: float) -> str:
        later = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + seconds)
        return texts(header.lines(state, later, columns, rows=2))[0]

    silent = reducer.apply(FLEET, Connection("silent", CLOCK.at_monotonic + 4, "no message"), CLOCK.at_monotonic)
    assert "RUNNING" in head(FLEET, 0) and "WAITING" not in head(FLEET, 0)
    assert "WAITING FOR studio's AGENT 12 s" in head(silent, 12) and "RUNNING" not in head(silent, 12)
    assert "WAITING FOR studio's AGENT 2m 05s" in head(silent, 125)
    assert FLEET.run is not None
    for changes in ({"kind": "guest"}, {"lead": "mbp"}, {"state": "finished"}):
        other = msgspec.structs.replace(silent, run=msgspec.structs.replace(FLEET.run, **changes))
        assert "WAITING" not in head(other, 12) and "agent silent 12s" in head(other, 12)


@pytest.mark.parametrize("state", ["failed", "stopped"])
def test_how_a_run_ended_is_said_and_when_it_would_have_is_not(state: m.RunState) -> None:
    head = texts(header.lines(attached(1, state, reason="out of memory"), CLOCK, 80, rows=2))[0]
    assert "out of memory" in head and "ETA 1" not in head


@given(
    st.integers(base.LEAST_COLUMNS, 220),
    st.integers(base.LEAST_ROWS, 70),
    st.sampled_from([FLEET, MIXED, ALONE, NOTHING, md.ViewState()]),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_every_size_is_filled_exactly(columns: int, rows: int, state: md.ViewState, lettered: bool) -> None:
    made = page(msgspec.structs.replace(state, lettered=lettered), CLOCK, columns, rows, selected=2)
    assert len(made) == rows
    assert {ln.width(pieces) for pieces in made} == {columns}


def test_before_anything_answers_no_run_is_not_said_to_be_missing() -> None:
    waiting, empty = ("\n".join(texts(page(state, CLOCK, 80, 24))) for state in (ViewState(), NOTHING))
    assert "connecting" in waiting and "no run yet" not in waiting
    assert "no run yet" in empty


def test_the_chart_by_node_tells_equal_steps_apart_by_what_each_rank_is_busy() -> None:
    panel = overview.busy_panel(GROUP)
    assert [track.label for track in panel.traces] == ["step", "torch-a", "torch-b", "mlx-c"]
    assert [round(float(track.window.last[-1]), 2) for track in panel.traces] == [0.4, 0.29, 0.26, 0.37]
    assert [track.label for track in overview.busy_panel(ALONE).traces] == ["atlas"]


def test_of_many_ranks_the_chart_has_their_span_the_selected_one_and_the_straggler() -> None:
    state = GROUP
    assert state.run is not None
    many = tuple(msgspec.structs.replace(state.run.ranks[0], rank=rank, node=f"node-{rank}") for rank in range(8))
    run = msgspec.structs.replace(state.run, ranks=many)
    wide = msgspec.structs.replace(state, run=run)
    panel = overview.busy_panel(wide, selected=1)
    assert [track.label for track in panel.traces] == ["step", "mean", "node-1", "node-2"]
    calm = msgspec.structs.replace(state, run=msgspec.structs.replace(run, straggler=None))
    span = panel.traces[1]
    assert span.band and (span.window.minimum[-1], span.window.maximum[-1]) == pytest.approx((0.26, 0.37), abs=0.005)
    assert [track.label for track in overview.rate_panel(calm).traces] == ["mean"]


def test_a_node_with_two_ranks_is_shown_and_not_only_counted() -> None:
    assert GROUP.run is not None
    first, *others = GROUP.run.ranks
    ranks = (first, msgspec.structs.replace(others[0], node=first.node))
    state = msgspec.structs.replace(GROUP, run=msgspec.structs.replace(GROUP.run, ranks=ranks))
    shown = "\n".join(texts(page(state, CLOCK, 120, 40)))
    assert "2×cpu" in shown and "more ranks" not in shown
