"""Tests of what a rank's row, status and charts say: its waits, its peak memory, and the compiler's time."""

from pathlib import Path

import msgspec
import pytest
from tests.memory_values import memory
from tests.tui.support import run_directory
from tests.tui.support.recorded import (
    CLOCK,
    CONNECTED,
    committed,
    rank_step,
    run_view,
    snapshot,
)  # fmt: skip
from tests.tui.support.states import ALONE, GROUP, SHRUNK, state_after

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.whole_run import WholeRunReader
from trainctl.tui.cli import tables
from trainctl.tui.report import read_facts
from trainctl.tui.screens import fleet_table, node
from trainctl.tui.state import filter_language as ft
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.state.step_phases import Compilation
from trainctl.tui.state.table_schemas import FLEET
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.styled_line import plain


def test_a_wait_is_unknown_while_reports_are_still_to_come() -> None:
    state = GROUP
    ahead = msgspec.structs.replace(state.ranks[0].value, step=119, seq=state.seq + 1)
    waits = [row.wait for row in rank_rows.rows(reducer.apply(state, ahead, CLOCK.at_monotonic), CLOCK)]
    assert waits == [row.wait for row in rank_rows.rows(state, CLOCK)]
    assert None not in waits
    alone = msgspec.structs.replace(
        state, parts={**state.parts, 0: (ahead,)}, ranks={**state.ranks, 0: md.Seen(ahead, 0)}
    )
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
    assert SHRUNK.run is not None
    assert [view.node for view in SHRUNK.run.live_ranks] == ["torch-a"]
    assert SHRUNK.run.reporting == [0]
    assert rank_rows.sum_of_own_rates(SHRUNK) == pytest.approx(5200, rel=0.02)
    alone, step = msgspec.structs.replace(ALONE, recent={}), rank_step(run_view(1), 118, 0)
    busy = step.phases.data + step.phases.forward + step.phases.backward
    assert rank_rows.own_rate(alone, 0, alone.ranks[0]) == pytest.approx(step.tokens / busy)
    assert [row.step is None for row in rank_rows.rows(SHRUNK, CLOCK)] == [False, True, True]


def test_efficiency_is_of_the_present_plan_alone_and_unknown_if_a_rank_of_it_is() -> None:
    state = GROUP
    alone = msgspec.structs.replace(run_view(3), ranks=run_view(3).ranks[:1])
    assert rank_rows.efficiency(msgspec.structs.replace(state, run=alone)) is None, "as to a node that doesn't conduct"
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


GB = 10**9
VIEW = run_view(4, step=18_240, steps=60_000)
RANK = 2
HELD, PEAK, CAP = 12 * GB, 23 * GB, 24 * GB


def state_with(held: int | None, peak: int | None) -> md.ViewState:
    """The fleet after a step whose memory on forge was as given."""
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(VIEW), CLOCK.at_monotonic)
    return reducer.apply(state, step_with(held, peak), CLOCK.at_monotonic)


def step_with(held: int | None, peak: int | None, seq: int = VIEW.step + 1) -> m.RankStep:
    part = rank_step(VIEW, VIEW.step, RANK, seq=seq)
    return msgspec.structs.replace(part, values=memory(held, peak, CAP))


@pytest.mark.parametrize(
    ("held", "peak", "shown", "is_full"),
    [
        (HELD, PEAK, "23/24", True), (HELD, 13 * GB, "13/24", False), (HELD, None, "12/24", False),
        (None, None, "n/a", False),
    ],
)  # fmt: skip
def test_the_mem_column_and_the_status_table_show_the_peak_of_the_step(
    held: int | None, peak: int | None, shown: str, is_full: bool
) -> None:
    state = state_with(held, peak)
    made = next(row for row in fleet_table.lines(state, CLOCK, 160, total=False) if ln.plain(row).startswith("forge"))
    piece = next(piece for piece in made if piece.text.strip() == shown)
    assert (piece.role == "warning") == is_full
    table = tables._rank_row(VIEW.ranks[RANK], state.ranks[RANK].value, None, VIEW.global_batch)
    assert shown in table


@pytest.mark.parametrize(("text", "matches"), [("mem>20GB", 1), ("mem%>90", 1), ("peak>20GB", 1), ("held>20GB", 0)])
def test_filters_name_the_peak_and_what_is_held(text: str, matches: int) -> None:
    forge = [row for row in rank_rows.rows(state_with(HELD, PEAK), CLOCK) if row.view.rank == RANK]
    assert len(ft.parse(text, FLEET).kept(forge)) == matches


def history(**values: float) -> m.History:
    """One step of rank 0: the phases all at 1 s, and the memory given."""
    every = {f"{name}_seconds": 1.0 for name in m.PHASES} | values
    return m.History(rid="r", series=tuple(m.Series(k, 0, 1, (7,), (v,), (v,), (v,), (v,)) for k, v in every.items()))


def test_a_nodes_chart_is_of_peaks_and_of_what_was_held_in_records_without_them() -> None:
    with_peaks = step_phases.past_of("r", history(memory_bytes=1.0, memory_peak_bytes=3.0))
    without = step_phases.past_of("r", history(memory_bytes=1.0))
    assert [past.laps[0][7].memory_bytes for past in (with_peaks, without)] == [3.0, 1.0]


FOUR = run_view(4)
FORGE = 2
FIRST = Compilation(1, 1, 41.2)
NOTHING = step_phases.RecordedPhases()


def compiled(*found: tuple[int, float], size: int = 1, rank: int = FORGE) -> m.History:
    steps, values = tuple(step for step, _ in found), tuple(value for _, value in found)
    return m.History(rid="r", series=(m.Series("compile_seconds", rank, size, steps, *[values] * 4),))


def test_the_longest_of_each_rank_is_kept_with_its_exact_step() -> None:
    whole, near = compiled((0, 41.2), (5000, 9.0), size=100), compiled((1, 41.2), (2, 3.0))
    assert step_phases.compiled_by_rank([whole]) == {FORGE: Compilation(1, 99, 41.2)}
    assert step_phases.compiled_by_rank([whole, near, compiled((7, 8.0), rank=0)]) == {
        FORGE: FIRST,
        0: Compilation(7, 7, 8.0),
    }
    assert step_phases.compiled_by_rank([compiled()]) == {}


def live(*steps: tuple[int, float]) -> md.ViewState:
    """The fleet of four after steps of forge, with what the compiler took in them; 0 is no compilation."""
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(FOUR), CLOCK.at_monotonic)
    for seq, (step, seconds) in enumerate(steps, 1):
        values = {"compile_seconds": seconds} if seconds else {}
        part = msgspec.structs.replace(rank_step(FOUR, step, FORGE, seq=seq), values=values)
        state = reducer.apply(state, part, CLOCK.at_monotonic)
    return state


def test_what_comes_live_counts_however_long_ago_it_was() -> None:
    later = [(step, 0.0) for step in range(FOUR.step + 2, FOUR.step + 2 + 4 * reducer.RECENT_LAPS)]
    state = live((FOUR.step + 1, 12.5), *later)
    assert step_phases.compiled(state, NOTHING, FORGE) == Compilation(FOUR.step + 1, FOUR.step + 1, 12.5)
    assert step_phases.compiled(state, step_phases.RecordedPhases(FOUR.run, {}, {FORGE: FIRST}), FORGE) == FIRST
    assert step_phases.compiled(state, NOTHING, 0) is None


def test_the_node_screen_shows_it_beside_the_compilers_mode() -> None:
    past = step_phases.past_of(FOUR.run, m.History(rid="r", series=()), [compiled((1, 41.2))])

    def text(past: step_phases.RecordedPhases, state: md.ViewState) -> str:
        made, _ = node.node_lines(state, rank_rows.rows(state, CLOCK)[FORGE], past, CLOCK, 80, 22)
        return "\n".join(plain(line) for line in made)

    assert "compile default" in text(past, live()) and "compiled 41.2 s at step 1" in text(past, live())
    assert "compiled" not in text(step_phases.RecordedPhases("another", {}, past.compiled), live())
    assert f"compiled 12.5 s at step {FOUR.step + 1:,}" in text(NOTHING, live((FOUR.step + 1, 12.5)))


def test_a_report_finds_the_step_in_a_long_record(tmp_path: Path) -> None:
    paths, took = RunPaths(tmp_path / "run-1"), {1: 7.5, 350: 41.2, 351: 3.0}
    paths.logs.mkdir(parents=True)
    with RunDb(paths, resumable=False) as recorder:
        for step, parts in run_directory.simulated(2, 500).steps:
            for part in parts[:1] if step.step in took else ():
                part.values["compile_seconds"] = took[step.step]
            recorder.commit(step, parts, step.committed_at)
    with WholeRunReader(paths) as reader:
        first, second = reader.ranks()
        assert read_facts._compiled(reader, first) == Compilation(350, 350, 41.2)
        assert read_facts._compiled(reader, second) is None
