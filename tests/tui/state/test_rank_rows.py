"""Rows of the ranks: own rates, waits, and how efficient their split is."""

import dataclasses

import msgspec
import pytest
from tests.tui.support.recorded import (
    CLOCK,
    committed,
    rank_step,
    run_view,
)  # fmt: skip
from tests.tui.support.states import ALONE, GROUP, SHRUNK, state_after

from trainctl.protocol import messages as m
from trainctl.tui.screens import fleet_table
from trainctl.tui.state import rank_rows, rank_speed, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.text import styled_line as ln


def test_a_wait_is_unknown_while_reports_are_still_to_come() -> None:
    state = GROUP
    ahead = msgspec.structs.replace(state.ranks[0].value, step=119, seq=state.seq + 1)
    waits = [row.wait for row in rank_rows.rows(reducer.apply(state, ahead, CLOCK.at_monotonic), CLOCK)]
    assert waits == [row.wait for row in rank_rows.rows(state, CLOCK)]
    assert None not in waits
    alone = dataclasses.replace(state, parts={**state.parts, 0: (ahead,)}, ranks={**state.ranks, 0: md.Seen(ahead, 0)})
    assert [row.wait for row in rank_rows.rows(alone, CLOCK)] == [None] * 3


def drained(view: m.RunView, rank: int) -> m.RunView:
    """A rank is out, and the first one has its samples."""
    ranks = [msgspec.structs.replace(item, state="drained", share=0) if item.rank == rank else item
             for item in view.ranks]  # fmt: skip
    ranks[0] = msgspec.structs.replace(ranks[0], share=ranks[0].share + view.ranks[rank].share)
    return msgspec.structs.replace(view, ranks=tuple(ranks))


def test_a_drained_rank_is_out_of_the_scale_and_of_the_sums() -> None:
    state = GROUP
    old = msgspec.structs.replace(state.ranks[2].value, step_seconds=9.0, seq=state.seq + 1, step=119)
    state = state_after([old, msgspec.structs.replace(drained(run_view(3), 2), seq=state.seq + 2)], state)
    assert [row.slowest_seconds for row in rank_rows.rows(state, CLOCK)] == [0.4] * 3
    assert " 0.81" in ln.plain(fleet_table.lines(state, CLOCK, 120, total=True)[4]), "0.41 and 0.40 GB"


def test_ranks_that_are_out_have_no_part_in_the_sums() -> None:
    assert [view.node for view in rank_speed.live_ranks(SHRUNK.run)] == ["torch-a"]
    assert rank_speed.reporting(SHRUNK.run) == [0]
    assert rank_rows.sum_of_own_rates(SHRUNK) == pytest.approx(5200, rel=0.02)
    alone, step = dataclasses.replace(ALONE, recent={}), rank_step(run_view(1), 118, 0)
    busy = step.phases.data + step.phases.forward + step.phases.backward
    assert rank_rows.own_rate(alone, 0, alone.ranks[0]) == pytest.approx(step.tokens / busy)
    assert [row.step is None for row in rank_rows.rows(SHRUNK, CLOCK)] == [False, True, True]


def test_efficiency_is_of_the_present_plan_alone_and_unknown_if_a_rank_of_it_is() -> None:
    state = GROUP
    alone = msgspec.structs.replace(run_view(3), ranks=run_view(3).ranks[:1])
    assert rank_rows.efficiency(dataclasses.replace(state, run=alone)) is None, "as to a node that doesn't conduct"
    assert rank_rows.efficiency(state) == pytest.approx(3048 / 0.4 / (5200 + 4900 + 690), rel=0.02)
    view = msgspec.structs.replace(drained(run_view(3), 2), seq=state.seq + 1, plan_version=5)
    state = reducer.apply(state, view, CLOCK.at_monotonic)
    for number in range(119, 125):
        done = msgspec.structs.replace(committed(view, number, seconds=0.32), plan_version=5, seq=state.seq + 1)
        state = reducer.apply(state, done, CLOCK.at_monotonic)
        for rank in (0, 1):
            part = msgspec.structs.replace(rank_step(run_view(3), number, rank), seq=state.seq + 1)
            state = reducer.apply(state, part, CLOCK.at_monotonic)
        known = rank_rows.efficiency(state)
        assert known is None if number < 122 else known == pytest.approx(3048 / 0.32 / (5200 + 4900), rel=0.02)
