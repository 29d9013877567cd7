"""The Node screen: what a rank computes with, its memory by part, its operations, and its agent; at every size."""

import re

import msgspec
import pytest
from tests.memory_values import memory
from tests.tui.support.driving import body, running, until
from tests.tui.support.logs import logging_source
from tests.tui.support.recorded import CLOCK, CONNECTED, OF_FOUR, host, rank_step, run_view, snapshot
from tests.tui.support.states import state_after

from trainctl.protocol import messages as m
from trainctl.tui.cli import tables
from trainctl.tui.report import run_side, setup_sections
from trainctl.tui.report.document import ReportTable
from trainctl.tui.report.run_facts import RankFacts
from trainctl.tui.screens import node
from trainctl.tui.screens.node import NodeScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.state import rank_rows, step_phases
from trainctl.tui.state.step_phases import Compilation
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import run_lines
from trainctl.tui.text.styled_line import plain, width

FOUR = run_view(4)
FORGE = 2
LONGEST = m.Compute("float16", True, "reduce-overhead", "varlen", "float32 adapters", True, False, "triton")
SETTINGS = {
    "dtype": "float16",
    "weights": "float32 adapters",
    "tf32": "on",
    "compile": "reduce-overhead",
    "attention": "varlen",
    "deterministic": "on",
    "cudnn_benchmark": "off",
    "update": "triton",
}
VERSIONS = {
    "python": "3.11.7",
    "torch": "2.13.0+cu128",
    "transformers": "5.23.0",
    "peft": "0.21.2",
    "bitsandbytes": "0.49.0",
    "numpy": "2.4.6",
    "cuda": "12.8",
    "driver": "570.86.10",
}
VERSIONED = msgspec.structs.replace(LONGEST, versions=tuple(VERSIONS.items()))
GB = 10**9
PARTS = {"weights": 2.2, "gradients": 4.4, "moments": 8.8, "activations": 6.6}
MEMORY = memory(12 * GB, 22 * GB, 24 * GB)
MEMORY_PARTS = {f"memory_{name}_bytes": size * GB for name, size in PARTS.items()} | {"memory_cache_bytes": 1.7 * GB}


def with_compute(compute: m.Compute | None) -> m.RunView:
    forge = msgspec.structs.replace(FOUR.ranks[FORGE], compute=compute)
    return msgspec.structs.replace(FOUR, ranks=(*FOUR.ranks[:FORGE], forge, *FOUR.ranks[FORGE + 1 :]))


def state_of(view: m.RunView, values: dict[str, float]) -> ViewState:
    """Return the fleet's state after a step with such values on forge, with a reading of its machine and GPU."""
    step = msgspec.structs.replace(rank_step(view, view.step, FORGE, seq=1), values=values)
    return state_after([CONNECTED, snapshot(view), step, host("forge", seq=2, gpu=True)])


def screen_of_forge(view: m.RunView, values: dict[str, float], columns: int, rows: int) -> list[str]:
    state = state_of(view, values)
    row = rank_rows.rows(state, CLOCK)[FORGE]
    lines, _ = node.node_lines(state, row, step_phases.RecordedPhases(), CLOCK, columns, rows)
    assert {width(line) for line in lines} == {columns} and len(lines) <= rows
    return [plain(line) for line in lines]


# ---------------------------------------------------------------- what it computes with


def computing(view: m.RunView) -> list[str]:
    """Return the lines of `trainctl status` on what ranks resolved."""
    text = tables.status_text(snapshot(view)).splitlines()
    first = next((number for number, line in enumerate(text) if line.startswith("computing  ")), len(text))
    end = next((number for number in range(first + 1, len(text)) if text[number][:1] != " "), first)
    assert all(len(line) <= 80 for line in text[first:end])
    return [line[11:] for line in text[first:end]]


def test_the_status_names_ranks_only_if_they_differ() -> None:
    four = computing(FOUR)
    assert four[0] == "studio, mbp: dtype bfloat16  weights float32  compile off"
    assert "forge: dtype bfloat16  weights float32  tf32 off  compile default" in four
    alike = tuple(msgspec.structs.replace(rank, compute=OF_FOUR["mlx"]) for rank in FOUR.ranks)
    (line,) = computing(msgspec.structs.replace(FOUR, ranks=alike))
    assert line == "dtype bfloat16  weights float32  compile off  attention mx.fast"
    silent = tuple(msgspec.structs.replace(rank, compute=None) for rank in FOUR.ranks)
    assert computing(msgspec.structs.replace(FOUR, ranks=silent)) == []


def test_the_status_and_a_comparison_have_the_versions_of_ranks_that_say_them() -> None:
    view = with_compute(VERSIONED)
    (line,) = [row for row in tables.status_text(snapshot(view)).splitlines() if row.startswith("versions  ")]
    assert line.startswith("versions   python 3.11.7  torch 2.13.0+cu128") and "studio" not in line
    assert "versions  " not in tables.status_text(snapshot(FOUR))
    libraries = run_side._libraries(view.ranks[FORGE])
    assert libraries["library on forge"] == "torch 2.13.0+cu128" and libraries["Python on forge"] == "3.11.7"
    assert libraries["cuda on forge"] == "12.8" and "torch on forge" not in libraries
    assert run_side._libraries(FOUR.ranks[FORGE]) == {}


def test_many_ranks_that_share_settings_lose_none_of_them_and_those_of_one_node_have_numbers() -> None:
    forge = with_compute(LONGEST).ranks[FORGE]
    many = [msgspec.structs.replace(forge, rank=number, node=f"workstation-{number}") for number in range(8)]
    shown = [plain(row) for row in run_lines.compute_rows([*many, FOUR.ranks[1]], 69)]
    assert all(len(row) <= 69 for row in shown)
    assert "workstation-6, workstation-7:" in " ".join(shown) and "dtype float16" in " ".join(shown)
    pair = tuple(msgspec.structs.replace(rank, node="box") for rank in with_compute(LONGEST).ranks[1:3])
    assert [plain(row).split()[0] for row in run_lines.compute_rows(pair, 200)] == ["box:1:", "box:2:"]


def test_a_report_has_a_column_for_each_setting_that_a_rank_has() -> None:
    def rank(number: int, compute: m.Compute | None, compiled: Compilation | None = None) -> RankFacts:
        return RankFacts(number, "n", f"n:{number}", "torch", "cpu", compute, 1, 1, 1, 1.0, 1.0, {}, {}, compiled)

    ranks = [
        rank(0, VERSIONED, Compilation(1, 1, 41.2)),
        rank(1, m.Compute("float32", weights="float32")),
        rank(2, None),
    ]
    (table,) = setup_sections._computing(ranks)
    assert isinstance(table, ReportTable)
    assert table.head == ("rank", *SETTINGS, "compiled")
    whole = ("n:0", *SETTINGS.values(), "41.2 s at step 1")
    assert table.rows == (whole, ("n:1", "float32", "float32", "", "off", *[""] * 5))
    assert list(setup_sections._computing(ranks[2:])) == []
    (versions,) = setup_sections._versions(ranks)
    assert isinstance(versions, ReportTable)
    assert versions.head == ("rank", *VERSIONS) and versions.rows == (("n:0", *VERSIONS.values()),)


# ---------------------------------------------------------------- its memory


@pytest.mark.parametrize(("columns", "rows"), [(80, 22), (100, 30), (113, 22), (114, 38), (200, 58), (300, 80)])
def test_all_parts_and_the_cache_are_shown_at_every_size_and_unknown_ones_are_not_named(
    columns: int, rows: int
) -> None:
    text = "\n".join(screen_of_forge(FOUR, MEMORY | MEMORY_PARTS, columns, rows))
    assert all(re.search(rf" {name[0]} {name} +{size}", text) for name, size in PARTS.items())
    assert "22/24 GB" in text and "1.7/24 GB" in text
    text = "\n".join(screen_of_forge(FOUR, MEMORY, columns, rows))
    assert "22/24 GB" in text and "12/24 GB" in text
    assert not any(f" {name} " in text for name in (*(f"{name[0]} {name}" for name in PARTS), "cache"))


# ---------------------------------------------------------------- by keys


async def test_a_node_is_opened_and_turned_to_the_next() -> None:
    async with running(logging_source()) as (pilot, app):
        await pilot.press("down", "down", "enter")
        assert isinstance(app.screen, NodeScreen) and app.selected == 1
        await until(pilot, lambda: "mean of 16 steps" in body(app))
        assert "node mbp 2 of 4" in body(app) and "log of mbp" in body(app)
        for key, node in (
            ("right", "forge"),
            ("tab", "mini"),
            ("tab", "studio"),
            ("left", "mini"),
            ("shift+tab", "forge"),
        ):
            await pilot.press(key)
            assert f"node {node} " in body(app), key
        await pilot.press("slash", *"step", "enter")
        await until(pilot, lambda: "'step' in 5" in body(app))
        await pilot.press("escape")
        assert isinstance(app.screen, NodeScreen) and "'step'" not in body(app)
        await pilot.press("escape")
        assert isinstance(app.screen, OverviewScreen)
        await pilot.click("#body", offset=(3, 5))
        assert isinstance(app.screen, NodeScreen) and app.selected == 2


async def test_what_is_unknown_of_a_node_s_agent_is_not_a_zero() -> None:
    async with running(logging_source()) as (pilot, app):
        await until(pilot, lambda: len(app.live.agents) == 3 and app.live.agents["forge"].lag_seconds is not None)
        await pilot.press("2")
        assert "agent connected  leads  at tcp://127.0.0.1:7474  lag n/a  version 0.1.0" in body(app)
        await pilot.press("right")
        assert "agent connected  at tcp://192.168.7.21:7474  lag 1 ms  version 0.1.0" in body(app)
        await pilot.press("left", "left")
        for words in ("agent silent 4h 00m  no answer", "at n/a", "processes n/a", "own n/a", "cpu n/a", "no step yet"):
            assert words in body(app)
