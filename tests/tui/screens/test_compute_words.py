"""What each rank resolved: on its Node screen at 80 and 120 columns, in the status and in a report."""

import msgspec
import pytest
from tests.tui.support.recorded import CLOCK, CONNECTED, OF_FOUR, rank_step, run_view, snapshot

from trainctl.protocol import messages as m
from trainctl.tui.cli import tables
from trainctl.tui.report import run_side, setup_sections
from trainctl.tui.report.document import ReportTable
from trainctl.tui.report.run_facts import RankFacts
from trainctl.tui.screens import node_facts, node_view
from trainctl.tui.state import rank_rows, reducer, step_phases
from trainctl.tui.state import view_state as md
from trainctl.tui.text import compute_words
from trainctl.tui.text.compile_times import Compilation
from trainctl.tui.text.glyphs import UNICODE
from trainctl.tui.text.styled_line import plain

FOUR = run_view(4)
FORGE = 2
LONGEST = m.Compute("float16", True, "reduce-overhead", "varlen", "float32 adapters", True, False, "triton")
WORDS = {
    "dtype": "float16", "weights": "float32 adapters", "tf32": "on", "compile": "reduce-overhead",
    "attention": "varlen", "deterministic": "on", "cudnn_benchmark": "off", "update": "triton",
}  # fmt: skip


def with_compute(compute: m.Compute | None) -> m.RunView:
    forge = msgspec.structs.replace(FOUR.ranks[FORGE], compute=compute)
    return msgspec.structs.replace(FOUR, ranks=(*FOUR.ranks[:FORGE], forge, *FOUR.ranks[FORGE + 1 :]))


def lines_of_forge(compute: m.Compute | None, columns: int, rows: int) -> list[str]:
    state = reducer.apply(reducer.apply(md.ViewState(), CONNECTED, 0.0), snapshot(with_compute(compute)), 0.0)
    step = msgspec.structs.replace(rank_step(FOUR, FOUR.step, FORGE, seq=1), values={"tflops": 40.0, "mfu": 0.4})
    row = rank_rows.rows(reducer.apply(state, step, 0.0), CLOCK)[FORGE]
    made, _ = node_view.lines(state, row, step_phases.RecordedPhases(), CLOCK, columns, rows, UNICODE)
    return [plain(line) for line in made]


@pytest.mark.parametrize(("columns", "rows"), [(80, 22), (120, 38), (200, 58)])
def test_the_node_screen_has_every_setting_at_every_size(columns: int, rows: int) -> None:
    lines = lines_of_forge(LONGEST, columns, rows)
    first = next(number for number, line in enumerate(lines) if line.startswith("dtype "))
    shown = " ".join(lines[first : first + node_facts.MOST_COMPUTE_LINES])
    for name, value in WORDS.items():
        assert f"{name} {value}" in shown
    assert "40 TFLOP/s, peak unknown: trainctl calibrate, MFU 40%" in shown
    (agent,) = [number for number, line in enumerate(lines) if line.startswith("agent ")]
    assert first < agent <= first + node_facts.MOST_COMPUTE_LINES


def test_what_a_device_does_not_have_takes_no_room() -> None:
    lines = lines_of_forge(m.Compute("float32", weights="float32"), 80, 22)
    (first,) = [number for number, line in enumerate(lines) if line.startswith("dtype ")]
    assert lines[first].split() == ["dtype", "float32", "weights", "float32", "compile", "off"]
    assert lines[first + 1].startswith("40 TFLOP/s")
    assert "dtype n/a" in "\n".join(lines_of_forge(None, 80, 22))


def computing(view: m.RunView) -> list[str]:
    """The lines of `trainctl status` on what ranks resolved."""
    text = tables.status_text(snapshot(view)).splitlines()
    first = next((number for number, line in enumerate(text) if line.startswith("computing  ")), len(text))
    end = next((number for number in range(first + 1, len(text)) if text[number][:1] != " "), first)
    assert all(len(line) <= 80 for line in text[first:end])
    return [line[11:] for line in text[first:end]]


def test_the_status_names_ranks_only_if_they_differ() -> None:
    four = computing(FOUR)
    assert four[0] == "studio, mbp: dtype bfloat16  weights float32  compile off"
    assert "forge: dtype bfloat16  weights float32  tf32 off  compile default" in four
    assert "cudnn_benchmark on" in four[-1]
    alike = tuple(msgspec.structs.replace(rank, compute=OF_FOUR["mlx"]) for rank in FOUR.ranks)
    (line,) = computing(msgspec.structs.replace(FOUR, ranks=alike))
    assert line == "dtype bfloat16  weights float32  compile off  attention mx.fast"
    silent = tuple(msgspec.structs.replace(rank, compute=None) for rank in FOUR.ranks)
    assert computing(msgspec.structs.replace(FOUR, ranks=silent)) == []


VERSIONS = {
    "python": "3.11.7", "torch": "2.13.0+cu128", "transformers": "5.23.0", "peft": "0.21.2", "bitsandbytes": "0.49.0",
    "numpy": "2.4.6", "cuda": "12.8", "driver": "570.86.10",
}  # fmt: skip


@pytest.mark.parametrize(("columns", "rows", "there"), [(80, 22, False), (80, 40, True), (120, 38, True)])
def test_versions_are_shown_where_there_is_room(columns: int, rows: int, there: bool) -> None:
    lines = lines_of_forge(msgspec.structs.replace(LONGEST, versions=tuple(VERSIONS.items())), columns, rows)
    (agent,) = [number for number, line in enumerate(lines) if line.startswith("agent ")]
    shown = " ".join(lines[:agent])
    assert [f"{name} {version}" in shown for name, version in VERSIONS.items()] == [there] * len(VERSIONS)
    assert len(lines) <= rows


def test_the_status_has_the_versions_of_ranks_that_say_them() -> None:
    text = tables.status_text(
        snapshot(with_compute(msgspec.structs.replace(LONGEST, versions=tuple(VERSIONS.items()))))
    )
    (first,) = [line for line in text.splitlines() if line.startswith("versions  ")]
    assert first.startswith("versions   python 3.11.7  torch 2.13.0+cu128") and "studio" not in first
    assert "versions  " not in tables.status_text(snapshot(FOUR))


def test_a_comparison_has_the_versions_of_a_rank_by_the_names_of_those_in_checkpoints() -> None:
    forge = with_compute(msgspec.structs.replace(LONGEST, versions=tuple(VERSIONS.items()))).ranks[FORGE]
    found = run_side._libraries(forge)
    assert found["library on forge"] == "torch 2.13.0+cu128" and found["Python on forge"] == "3.11.7"
    assert found["cuda on forge"] == "12.8" and "torch on forge" not in found
    assert run_side._libraries(FOUR.ranks[FORGE]) == {}


def test_many_ranks_that_share_settings_lose_none_of_them() -> None:
    forge = with_compute(LONGEST).ranks[FORGE]
    many = [msgspec.structs.replace(forge, rank=number, node=f"workstation-{number}") for number in range(8)]
    shown = [plain(row) for row in compute_words.rows([*many, FOUR.ranks[1]], 69)]
    assert all(len(row) <= 69 for row in shown)
    assert "workstation-6, workstation-7:" in " ".join(shown) and "dtype float16" in " ".join(shown)


def test_ranks_of_one_node_have_their_numbers() -> None:
    ranks = tuple(msgspec.structs.replace(rank, node="box") for rank in with_compute(LONGEST).ranks[1:3])
    assert [plain(row).split()[0] for row in compute_words.rows(ranks, 200)] == ["box:1:", "box:2:"]


def test_a_report_has_a_column_for_each_setting_that_a_rank_has() -> None:
    def rank(number: int, compute: m.Compute | None, compiled: Compilation | None = None) -> RankFacts:
        return RankFacts(number, "n", f"n:{number}", "torch", "cpu", compute, 1, 1, 1, 1.0, 1.0, {}, {}, compiled)

    ranks = [rank(0, LONGEST, Compilation(1, 1, 41.2)), rank(1, m.Compute("float32", weights="float32")), rank(2, None)]
    (table,) = setup_sections._computing(ranks)
    assert isinstance(table, ReportTable)
    assert table.head == ("rank", *WORDS, "compiled")
    assert table.rows == (
        ("n:0", *WORDS.values(), "41.2 s at step 1"), ("n:1", "float32", "float32", "", "off", *[""] * 5),
    )  # fmt: skip
    assert list(setup_sections._computing(ranks[2:])) == []
    (versions,) = setup_sections._versions(
        [rank(0, msgspec.structs.replace(LONGEST, versions=tuple(VERSIONS.items()))), *ranks[1:]]
    )
    assert isinstance(versions, ReportTable)
    assert versions.head == ("rank", *VERSIONS) and versions.rows == (("n:0", *VERSIONS.values()),)
