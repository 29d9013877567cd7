"""The memory that a step needs is its peak: what every screen shows of it, and what is predicted from it."""

import msgspec
import pytest
from tests.memory_values import memory
from tests.tui.support.recorded import CLOCK, CONNECTED, rank_step, run_view, snapshot

from trainctl.protocol import messages as m
from trainctl.tui.cli import tables
from trainctl.tui.screens import fleet_table
from trainctl.tui.state import filter_language as ft
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.state.table_schemas import FLEET
from trainctl.tui.text import styled_line as ln

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
