"""What a node's memory holds by part, on its screen at every size; of a rank that reports no parts, none are named."""

import re

import msgspec
import pytest
from tests.memory_values import memory
from tests.tui.support.recorded import CLOCK, CONNECTED, host, rank_step, run_view, snapshot

from trainctl.protocol import messages as m
from trainctl.tui.screens import node_view
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.text.glyphs import UNICODE
from trainctl.tui.text.styled_line import plain, width
from trainctl.tui.widgets import memory_breakdown

GB = 10**9
FORGE = 2
PARTS = {"weights": 2.2, "gradients": 4.4, "moments": 8.8, "activations": 6.6}
VALUES = {**memory(12 * GB, 22 * GB, 24 * GB), **{f"memory_{name}_bytes": size * GB for name, size in PARTS.items()},
          "memory_cache_bytes": 1.7 * GB}  # fmt: skip


def state_with(values: dict[str, float]) -> md.ViewState:
    """The fleet after a step whose memory on forge was as given, with a reading of its machine and GPU."""
    view = run_view(4)
    step = msgspec.structs.replace(rank_step(view, 118, FORGE, seq=1), values=values)
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(view), CLOCK.at_monotonic)
    for message in (step, host("forge", seq=2, gpu=True)):
        state = reducer.apply(state, message, CLOCK.at_monotonic)
    return state


def shown(values: dict[str, float], columns: int, rows: int) -> list[str]:
    state = state_with(values)
    made, _ = node_view.lines(
        state, rank_rows.rows(state, CLOCK)[FORGE], step_phases.RecordedPhases(), CLOCK, columns, rows, UNICODE
    )
    assert {width(line) for line in made} == {columns}
    return [plain(line) for line in made]


SIZES = [(80, 22), (80, 38), (100, 30), (113, 22), (114, 38), (120, 22), (120, 38), (200, 58), (300, 80)]


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_all_parts_and_the_cache_are_shown_at_every_size(columns: int, rows: int) -> None:
    text = "\n".join(shown(VALUES, columns, rows))
    for name, size in PARTS.items():
        assert re.search(rf" {name[0]} {name} +{size}", text), name
    assert "22/24 GB" in text and "1.7/24 GB" in text


@pytest.mark.parametrize(("columns", "rows"), SIZES)
def test_a_rank_without_parts_has_its_peak_and_no_empty_names(columns: int, rows: int) -> None:
    text = "\n".join(shown(memory(12 * GB, 22 * GB, 24 * GB), columns, rows))
    assert "22/24 GB" in text and "12/24 GB" in text
    assert not any(f" {name[0]} {name} " in text for name in PARTS)
    assert " cache " not in text


def breakdown(values: dict[str, float], columns: int, rows: int) -> list[str]:
    row = rank_rows.rows(state_with(values), CLOCK)[FORGE]
    made = [plain(line) for line in memory_breakdown.lines(row, columns, rows, UNICODE)]
    assert len(made) == rows
    return made


def test_the_bar_of_the_peak_has_a_letter_for_each_part_in_proportion() -> None:
    bar = breakdown(VALUES, 57, 8)[0].split()[-1]
    assert bar == "ww" + "gggg" + "mmmmmmmmm" + "aaaaaaa"  # of 24 cells, 22 of 24 GB
    without_cap = {name: value for name, value in VALUES.items() if name != "memory_cap_bytes"}
    assert breakdown(without_cap, 44, 8)[0].split() == ["step", "peak", "22", "GB", "wggmmmmmaaa"]


def test_parts_stand_alone_on_their_lines_if_there_is_room() -> None:
    tall = breakdown(VALUES, 44, 11)
    assert [line.split()[1] for line in tall[1:5]] == list(PARTS)
    assert [line.split()[-2] for line in tall[1:5]] == ["9%", "18%", "37%", "28%"]
    assert "resident" in tall[9] and "disk" in tall[10]


def test_with_few_rows_the_lines_that_say_least_are_left_out() -> None:
    names = [line[1:12].strip() for line in breakdown(VALUES, 39, 7)]
    assert names[3:] == ["cache", "machine", "device", "disk free"]
    unknown = m.HostReading(**{**msgspec.structs.asdict(host("forge")), "gpus": ()})
    state = reducer.apply(state_with(VALUES), msgspec.structs.replace(unknown, seq=3), CLOCK.at_monotonic)
    row = rank_rows.rows(state, CLOCK)[FORGE]
    names = [plain(line)[1:12].strip() for line in memory_breakdown.lines(row, 39, 7, UNICODE)]
    assert names[3:] == ["held after", "cache", "machine", "disk free"]
