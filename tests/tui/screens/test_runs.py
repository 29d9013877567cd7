"""The Runs screen: runs filtered, sorted, marked, compared, started and branched; nodes and separate work."""

from pathlib import Path

import msgspec
from tests.tui.support.driving import body, dialog_text, running, until
from tests.tui.support.recorded import (
    BRANCHES,
    CLOCK,
    CONNECTED,
    FAILED_SCORING,
    RUNS,
    SCORING,
    Recorded,
    host,
    run_view,
    snapshot,
    source_of,
)  # fmt: skip
from tests.tui.support.states import state_after
from textual.widgets import Input

from trainctl.protocol import messages as m
from trainctl.tui.dialogs.command_dialog import BranchDialog, CommandDialog, StartDialog
from trainctl.tui.screens import runs_view
from trainctl.tui.screens.charts import ChartsScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.screens.runs import RunsScreen
from trainctl.tui.screens.runs_view import as_tree, row_of
from trainctl.tui.state import reducer
from trainctl.tui.text import styled_line as ln


async def test_without_a_run_it_opens_on_the_runs() -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])

    async with running(source) as (pilot, app):
        assert isinstance(app.screen, RunsScreen)
        await until(pilot, lambda: "sft-1b" in body(app))
        await pilot.press("down", "s")
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.values() == {"resume": RUNS[2].run}
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))
    assert source.commands[0][:2] == ("start-run", {"resume": RUNS[2].run})


async def test_another_run_is_opened_from_the_record_and_1_comes_back() -> None:
    async with running(source_of(1)) as (pilot, app):
        await pilot.press("0")
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await until(pilot, lambda: screen.runs is not None)
        await pilot.press("down", "enter")
        await until(pilot, lambda: isinstance(app.screen, OverviewScreen))
        assert "FROM RECORD" in body(app)
        assert "STOPPED" in body(app)
        await pilot.press("1")
        assert "118/150" in body(app)
        await pilot.press("0", "down", "down", "enter")
        await until(pilot, lambda: bool(app._notifications))
        assert isinstance(app.screen, RunsScreen)


async def test_runs_are_filtered_sorted_marked_and_compared() -> None:
    async with running(source_of(4)) as (pilot, app):
        await pilot.press("0")
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await until(pilot, lambda: len(screen.rows) == 3)
        await pilot.press("slash", *"state:stopped", "enter")
        assert [row.run.name for row in screen.rows] == ["sft-1b"]
        await pilot.press("escape", "o")
        assert [row.run.name for row in screen.rows] == ["sft-1b", "stdlib", "tiny"]
        await pilot.press("O", "O", "c")
        assert any("mark another run" in str(item.message) for item in app._notifications)
        await pilot.press("home", "k", "k", "space")
        assert "* " in body(app)
        await pilot.press("c")
        await until(pilot, lambda: isinstance(app.screen, ChartsScreen) and bool(app.screen.view.runs))
        assert isinstance(app.screen, ChartsScreen)
        assert app.shown.run is not None
        assert (app.shown.run.run, *app.screen.view.runs) == ("sft-1b-20261119-090000", "stdlib-20261120-142900")
        await pilot.press("0")
        await pilot.click("#body", offset=(10, 5))
        assert screen.chosen is not None
        assert screen.chosen.name == "tiny"


RUN_FILE = """
[run]
name = "tiny"
steps = 40
[model]
path = "{here}/model"
[data]
path = "{here}/text"
[batch]
global = 8
[optimizer]
learning_rate = 1e-3
"""


async def test_n_starts_a_run_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    source = source_of(1)

    async with running(source, address="tcp://192.0.2.7:7474") as (pilot, app):
        await pilot.press("0", "N")
        dialog = app.screen
        assert isinstance(dialog, StartDialog)
        assert "run file: give its path" in dialog_text(app)
        box = dialog.query_one("#field-file")
        box.value = str(file)  # type: ignore[attr-defined]
        await until(pilot, lambda: "no such file" in dialog_text(app))
        await pilot.press("enter")
        assert not source.commands
        file.write_text(RUN_FILE.format(here=tmp_path))
        (tmp_path / "text").mkdir()
        box.value = str(file) + " "  # type: ignore[attr-defined]
        await until(pilot, lambda: "tiny: 40 steps of 8 samples" in dialog_text(app))
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))
    verb, args, options = source.commands[0]
    assert (verb, args["config"]["run"]["name"], options["run"]) == ("start-run", "tiny", None)


async def test_a_branch_is_started_from_a_checkpoint_with_settings() -> None:
    source = Recorded([CONNECTED, snapshot(None)], runs=RUNS[1:])

    async with running(source) as (pilot, app):
        await until(pilot, lambda: "sft-1b" in body(app))
        await pilot.press("B")
        screen = app.screen
        assert isinstance(screen, BranchDialog)
        screen.query_one("#field-step", Input).value = "0"
        await pilot.press("enter")
        assert not source.commands, "no step of a checkpoint"
        screen.query_one("#field-step", Input).value = "9000"
        screen.query_one("#field-settings", Input).value = "optimizer.learning_rate=1e-5 run.name='a b'"
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))
    overrides = {"optimizer.learning_rate": "1e-5", "run.name": "a b"}
    assert source.commands[0][:2] == ("start-run", {"branch": f"{RUNS[1].run}@9000", "overrides": overrides})


def test_branches_stand_below_their_parents_in_the_order_of_the_newest() -> None:
    shown = [(row.run.name, row.depth) for row in as_tree([row_of(run, CLOCK) for run in BRANCHES])]
    assert shown == [("sft-1b", 0), ("sft-1b-low", 1), ("sft-1b-warm", 2), ("sft-2", 0), ("tiny", 0)]
    around = [msgspec.structs.replace(one, branch=m.BranchPoint(other.run, 1))
              for one, other in ((BRANCHES[0], BRANCHES[1]), (BRANCHES[1], BRANCHES[0]))]  # fmt: skip
    assert len(as_tree([row_of(run, CLOCK) for run in around])) == 2, "a damaged record ends no screen"


def test_idle_nodes_come_first_and_what_they_can_is_told() -> None:
    state = state_after([CONNECTED, snapshot(run_view(1))])
    for node, at in (("spare", CLOCK.at_monotonic), ("gone", CLOCK.at_monotonic - 90)):
        state = reducer.apply_other(state, node, host(node), at)
    made = [ln.plain(row) for row in runs_view.nodes(state, (), CLOCK, 80, 9)]
    assert made[0].startswith("─ nodes: 2 idle of 3 ─")
    assert [row.split()[:2] for row in made[1:]] == [["spare", "idle"], ["gone", "silent"], ["atlas", "leads"]]
    assert "cpu 87%" in made[1]
    assert "cpu n/a" in made[2], "a reading that old says nothing"
    few = [ln.plain(row) for row in runs_view.nodes(state, (), CLOCK, 80, 3)]
    assert few[-1].startswith("… 2 more")
    assert {len(row) for row in [*made, *few]} == {80}


def test_nodes_that_score_are_not_idle_and_work_that_failed_says_why() -> None:
    state = reducer.apply_other(state_after([CONNECTED, snapshot(None)]), "studio", host("studio"), CLOCK.at_monotonic)

    def row_of_studio(work: m.WorkSummary) -> str:
        rows = [ln.plain(row) for row in runs_view.nodes(state, (work,), CLOCK, 80, 9)]
        return next(row for row in rows if row.startswith("studio"))

    assert "score test.jsonl" in row_of_studio(SCORING)
    assert "idle" in row_of_studio(FAILED_SCORING)
    _, failed = [ln.plain(row).rstrip() for row in runs_view.work((FAILED_SCORING,), 120)]
    assert "FAILED: no node can process the rows" in failed and "ETA" not in failed
