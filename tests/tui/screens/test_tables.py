"""The screens' tables by keys and mouse: filters, sorting, nodes that open, events in detail and undone, runs marked,
started and compared, values copied."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tests.tui.support.driving import body, dialog_text, driven, until
from tests.tui.support.pictures import SEVERAL, of_two_nodes
from tests.tui.support.recorded import (
    BOOT,
    CLOCK,
    CONNECTED,
    FAILED_SCORING,
    NOW,
    RUNS,
    SCORING,
    Recorded,
    host,
    rank_step,
    run_view,
    snapshot,
    source_of,
    under_way,
)
from textual.pilot import Pilot

from trainctl.protocol import messages as m
from trainctl.protocol.messages.events import MicroBatchChanged, SharesChanged
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.dialogs.command_dialog import CommandDialog
from trainctl.tui.dialogs.event_details import EventDetails
from trainctl.tui.dialogs.popup import Chooser
from trainctl.tui.dialogs.split_dialog import SplitDialog
from trainctl.tui.dialogs.start_run import StartDialog
from trainctl.tui.screens import fleet_grouping, fleet_table, runs_view
from trainctl.tui.screens.charts import ChartsScreen
from trainctl.tui.screens.events import EventsScreen
from trainctl.tui.screens.node import NodeScreen
from trainctl.tui.screens.overview import OverviewScreen
from trainctl.tui.screens.runs import RunsScreen
from trainctl.tui.state import rank_rows, reducer
from trainctl.tui.state import view_state as md
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.glyphs import UNICODE
from trainctl.tui.widgets.line_view import Lines


def note(app: TrainctlApp) -> str:
    return app.screen.query_one("#filter-note", Lines).shown[0]


def popup(app: TrainctlApp) -> str:
    return "\n".join(app.screen.query_one("#dialog-text", Lines).shown)


def nodes(app: TrainctlApp) -> list[str]:
    """The table's first column down to the charts."""
    rows = body(app).splitlines()
    start = next(at for at, row in enumerate(rows) if row.startswith("NODE"))
    end = next(at for at, row in enumerate(rows) if row.startswith("─ loss"))
    return [row.split()[0] for row in rows[start + 1 : end] if row.strip()]


async def test_a_filter_shows_its_errors_as_it_is_typed_and_the_last_good_one_stays() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        assert nodes(app) == ["studio", "mbp", "forge", "mini"]
        await pilot.press("slash")
        assert note(app).startswith("fields: node state rank")
        await pilot.press(*"tok/s<2k")
        assert nodes(app) == ["mbp"]
        assert "3 of 4 hidden" in note(app)
        await pilot.press(*" age<3x")
        assert note(app).startswith("column 14: '3x' is not a valid time; age takes 3s, 200ms")
        assert nodes(app) == ["mbp"]
        await pilot.press("enter")
        assert app.screen.query_one("#filter").has_focus, "what can't be understood isn't kept"
        await pilot.press("backspace", "s", "enter")
        assert note(app).startswith("/tok/s<2k age<3s ")
        assert note(app).rstrip().endswith("3 of 4 hidden  esc clears")
        await pilot.press("slash", "end", *" -mbp")
        assert "the filter hides all ranks" in body(app)
        await pilot.press("enter", "colon", "escape")
        assert "hidden" in note(app), "that escape was for the : line"
        await pilot.press("escape")
        assert nodes(app) == ["studio", "mbp", "forge", "mini"]
        assert not app.screen.query_one("FilterBar").display

    await driven(source_of(4), play)


async def test_the_fleet_is_sorted_by_keys_and_by_its_heads() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("o")
        assert nodes(app) == ["forge", "mbp", "mini", "studio"]
        assert "NODE↑" in body(app)
        await pilot.press("O")
        assert nodes(app) == ["studio", "mini", "mbp", "forge"]
        assert "NODE↓" in body(app)
        head = next(row for row in body(app).splitlines() if row.startswith("NODE"))
        line = body(app).splitlines().index(head)
        await pilot.click("#body", offset=(head.index("OWN T/S") + 2, line))
        assert nodes(app) == ["mbp", "studio", "forge", "mini"]
        assert "↑OWN T/S" in body(app)
        await pilot.click("#body", offset=(head.index("OWN T/S") + 2, line))
        assert nodes(app)[0] == "forge"
        await pilot.press("down", "down")
        assert app.selected == 0, "down goes along the rows as they are sorted"
        await pilot.click("#body", offset=(2, line + 1))
        await until(pilot, lambda: isinstance(app.screen, NodeScreen))
        assert app.selected == 2
        await pilot.press("1")
        await pilot.click("#body", offset=(head.index("OWN T/S") + 2, line))
        assert nodes(app) == ["studio", "mbp", "forge", "mini"]

    await driven(source_of(4), play)


# ---------------------------------------------------------------- a node of several devices


def seen(messages: Iterable[Any]) -> md.ViewState:
    state = md.ViewState()
    for message in messages:
        state = reducer.apply(state, message, CLOCK.at_monotonic)
    return state


def test_a_node_of_several_devices_is_one_row_of_sums_that_opens_into_its_ranks() -> None:
    state = seen(SEVERAL)
    rows = fleet_grouping.arranged(rank_rows.rows(state, CLOCK), fleet_grouping.Arrangement())
    assert [row.view.node for row in rows] == ["studio", "forge", "mini"]
    both, alone = rows[0], state.ranks
    assert both.members == (0, 1)
    assert both.view.share == 25
    assert both.own_rate is not None
    assert abs(both.own_rate - 4535) < 25
    assert both.step is not None
    assert both.step.peak_or_held_bytes == sum(alone[rank].value.peak_or_held_bytes or 0 for rank in (0, 1))
    assert both.passes is None, "their micro-batches are unlike"
    opened = fleet_grouping.Arrangement(opened=frozenset({"studio"}))
    text = [
        ln.plain(row) for row in fleet_table.lines(state, CLOCK, 160, UNICODE, total=True, wanted=opened, selected=1)
    ]
    assert [row.split()[0] for row in text[1:]] == ["▾", ":0", ":1", "forge", "mini", "FLEET"]
    assert {len(row) for row in text} == {160}


def test_the_worst_of_a_node_s_ranks_is_what_the_node_is() -> None:
    view = of_two_nodes()
    hung = msgspec.structs.replace(view.ranks[1], state="hung", why="gets on with nothing", since_at=NOW - 12)
    state = seen([CONNECTED, snapshot(msgspec.structs.replace(view, ranks=(view.ranks[0], hung, *view.ranks[2:])))])
    row = fleet_grouping.arranged(rank_rows.rows(state, CLOCK), fleet_grouping.Arrangement())[0]
    assert row.view.state == "hung"
    assert row.view.why == "rank 1: gets on with nothing"


async def test_right_opens_a_node_and_left_closes_it() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("down")
        assert nodes(app) == ["▸", "forge", "mini"]
        await pilot.press("right", "down")
        assert nodes(app) == ["▾", ":0", ":1", "forge", "mini"]
        assert app.selected == 1
        await pilot.press("left")
        assert nodes(app) == ["▸", "forge", "mini"]
        await pilot.press("down")
        assert app.selected == 2
        await pilot.click("#body", offset=(1, 3))
        await until(pilot, lambda: nodes(app)[0] == "▾")

    await driven(Recorded(list(SEVERAL)), play)


# ---------------------------------------------------------------- events


async def test_events_are_chosen_opened_sorted_and_undone() -> None:
    source = source_of(4)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("4")
        screen = app.screen
        assert isinstance(screen, EventsScreen)
        await until(pilot, lambda: len(screen.rows) == 6)
        await pilot.press("enter")
        assert "none: it isn't a change" in popup(app)
        await pilot.press("escape", "u")
        assert any("can't undo" in str(item.message) for item in app._notifications)
        await pilot.press("j", "j", "j", "k", "down", "enter")
        assert isinstance(app.screen, EventDetails)
        for words in ("Friday 20 November 2026, 12:01:05", "resize-batch", "18,170", "tokens/s", "medians of 20 and 20",
                      "resize-batch micro=4 --node studio"):  # fmt: skip
            assert words in popup(app)
        await pilot.press("u")
        assert isinstance(app.screen, CommandDialog)
        assert app.screen.values() == {"node": "studio", "micro": "4"}
        assert "undoes micro-batch: studio 4 → 8 @18,170" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: "applied" in dialog_text(app))
        verb, args, options = source.commands[0]
        assert (verb, args, options["node"], options["if_plan"]) == ("resize-batch", {"micro": 4}, "studio", 4)
        undoing = m.Event(
            id=7, at=NOW, severity="info", by="bo",
            data=MicroBatchChanged(before=(("studio", 8),), after=(("studio", 4),)),
            run=app.shown.run.run if app.shown.run else "", step=18_241, command=options["id"],
            undoes=options["undoes"], verb="resize-batch", outcome="applied", boot=BOOT, seq=50,
        )  # fmt: skip
        source.more.put_nowait(undoing)
        await pilot.press("escape")
        await until(pilot, lambda: "undoes @18,170" in body(app))
        await pilot.press("slash", *"is:undone", "enter")
        assert [row.event.id for row in screen.rows] == [3]
        await pilot.press("u")
        assert any("bo already undid it" in str(item.message) for item in app._notifications)
        await pilot.press("escape", "o", "o", "O", "home")
        assert screen.order.field == "by"
        assert [row.event.by for row in screen.rows] == ["bo", "auto", "auto", "auto", "auto", "anna", "anna"]
        await pilot.press("end", "pageup", "pagedown")
        await pilot.click("#body", offset=(20, 4))
        assert screen.cursor == 1

    await driven(source, play)


async def test_old_effects_are_asked_of_the_record() -> None:
    source = source_of(4)
    source.messages[1] = snapshot(run_view(4, step=18_240, steps=60_000))
    asked: list[tuple[int, int | None]] = []
    original = source.history

    async def history(
        run: str, metrics: tuple[str, ...], first_step: int = 0, last_step: int | None = None, columns: int = 120
    ) -> m.History:
        asked.append((first_step, last_step))
        return await original(run, metrics, first_step, last_step, columns)

    source.history = history  # type: ignore[method-assign]
    old = m.Event(
        id=9, at=NOW - 12000, severity="info", by="anna", step=9_000, verb="rebalance", outcome="applied", command="z",
        data=SharesChanged({"studio": 20, "mbp": 5}, {"studio": 16, "mbp": 9}),
    )  # fmt: skip

    async def events(run: str | None = None, after_id: int = 0, limit: int = 200, newest: bool = False) -> m.Events:
        assert run is not None
        return m.Events(rid="r", run=run, events=(msgspec.structs.replace(old, run=run),), more=False)

    source.events = events  # type: ignore[method-assign]

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("4")
        await until(pilot, lambda: (8_980, 9_019) in asked)

    await driven(source, play)


async def test_u_on_the_overview_lists_the_changes_that_can_be_undone() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("u")
        assert isinstance(app.screen, Chooser)
        assert "1 14:20 anna learning rate: 1.8e-4→1.62e-4 scaled @18,210;" in popup(app)
        await pilot.press("2")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert app.screen.values() == {"node": "studio", "micro": "4"}  # type: ignore[attr-defined]
        await pilot.press("escape", "u", "down", "up", "enter")
        await until(pilot, lambda: isinstance(app.screen, CommandDialog))
        assert app.screen.values() == {"value": "0.00018", "schedule": "scale"}  # type: ignore[attr-defined]
        await pilot.press("escape", "u", "escape")
        assert isinstance(app.screen, OverviewScreen)

    await driven(source_of(4), play)


async def test_a_split_is_undone_in_the_split_dialog() -> None:
    source = Recorded(under_way(run_view(3)))
    split = m.Event(
        id=30, at=NOW - 3, severity="info", by="anna", verb="rebalance", step=110, command="q", outcome="applied",
        data=SharesChanged({"torch-a": 8, "torch-b": 12, "mlx-c": 4}, {"torch-a": 12, "torch-b": 10, "mlx-c": 2}),
        run=run_view(3).run, boot=BOOT, seq=900,
    )  # fmt: skip
    source.messages.append(split)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await until(pilot, lambda: split in app.live.events)
        await pilot.press("u", "1")
        await until(pilot, lambda: isinstance(app.screen, SplitDialog))
        assert isinstance(app.screen, SplitDialog)
        assert app.screen.split.shares == (8, 12, 4)
        assert "undoes rebalance" in dialog_text(app)
        await pilot.press("enter")
        await until(pilot, lambda: bool(source.commands))

    await driven(source, play)
    verb, args, options = source.commands[0]
    assert (verb, args) == ("rebalance", {"shares": {"torch-a": 8, "torch-b": 12, "mlx-c": 4}})
    assert options["undoes"] == "q"


# ---------------------------------------------------------------- runs and copying


async def test_runs_are_filtered_sorted_marked_and_compared() -> None:
    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        await pilot.press("0")
        screen = app.screen
        assert isinstance(screen, RunsScreen)
        await until(pilot, lambda: len(screen.rows) == 3)
        for words in ("LASTED", "1m 35s", "nodes: 0 idle of 1", "leads sft-1b"):
            assert words in body(app)
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

    await driven(source_of(4), play)


async def test_n_starts_a_run_from_its_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    source = source_of(1)

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
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

    await driven(source, play, address="tcp://192.0.2.7:7474")
    verb, args, options = source.commands[0]
    assert (verb, args["config"]["run"]["name"], options["run"]) == ("start-run", "tiny", None)


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


async def test_y_copies_a_value_by_osc_52() -> None:
    copied: list[str] = []

    async def play(pilot: Pilot[int], app: TrainctlApp) -> None:
        app.copy_to_clipboard = copied.append  # type: ignore[method-assign]
        await pilot.press("down", "y")
        assert isinstance(app.screen, Chooser)
        assert "1 node        studio" in popup(app)
        await pilot.press("enter")
        await until(pilot, lambda: copied == ["studio"])
        await pilot.press("y", "2")
        await until(pilot, lambda: copied[1:] == ["tcp://127.0.0.1:7474"])
        assert any("copied address: tcp://" in str(item.message) for item in app._notifications)
        await pilot.press("4", "y", "2")
        await until(pilot, lambda: copied[2:] == ["mini slowed by 142 ms in backward"])
        await pilot.press("enter", "y", "3")
        await until(pilot, lambda: copied[3:] == ["18240"])
        await pilot.press("0")
        await until(pilot, lambda: "stdlib" in body(app))
        await pilot.press("y", "1")
        await until(pilot, lambda: copied[4:] == ["stdlib-20261120-142900"])

    await driven(source_of(4), play)


def test_a_link_that_is_silent_says_for_how_long() -> None:
    state = seen([CONNECTED, snapshot(run_view(4, step=18_240, steps=60_000))])
    state = reducer.apply_other(state, "mbp", rank_step(run_view(4), 1, 1), CLOCK.at_monotonic - 40)  # type: ignore[arg-type]
    rows = [ln.plain(row) for row in fleet_table.lines(state, CLOCK, 160, UNICODE, total=False)]
    assert "LINK" in rows[0]
    assert " up " in rows[1]
    assert "silent 40s" in rows[2]


def test_idle_nodes_come_first_and_what_they_can_is_told() -> None:
    state = seen([CONNECTED, snapshot(run_view(1))])
    for node, at in (("spare", CLOCK.at_monotonic), ("gone", CLOCK.at_monotonic - 90)):
        state = reducer.apply_other(state, node, host(node), at)
    made = [ln.plain(row) for row in runs_view.nodes(state, (), CLOCK, 80, 9, UNICODE)]
    assert made[0].startswith("─ nodes: 2 idle of 3 ─")
    assert [row.split()[:2] for row in made[1:]] == [["spare", "idle"], ["gone", "silent"], ["atlas", "leads"]]
    assert "cpu 87%" in made[1]
    assert "cpu n/a" in made[2], "a reading that old says nothing"
    few = [ln.plain(row) for row in runs_view.nodes(state, (), CLOCK, 80, 3, UNICODE)]
    assert few[-1].startswith("… 2 more")
    assert {len(row) for row in [*made, *few]} == {80}


def test_nodes_that_score_are_not_idle() -> None:
    state = seen([CONNECTED, snapshot(None)])
    state = reducer.apply_other(state, "studio", host("studio"), CLOCK.at_monotonic)

    def doing(work: m.WorkSummary) -> str:
        made = [ln.plain(row) for row in runs_view.nodes(state, (work,), CLOCK, 80, 9, UNICODE)]
        return next(row for row in made if row.startswith("studio"))

    assert "score test.jsonl" in doing(SCORING)
    assert "idle" in doing(FAILED_SCORING)


def test_work_that_failed_says_why() -> None:
    made = [ln.plain(row).rstrip() for row in runs_view.work((FAILED_SCORING,), 120, UNICODE)]
    assert made[0].startswith("─ score test.jsonl with sft-1b-20261119-090000 step 18,240 ─")
    assert made[1].startswith("1,200/5,000 rows 24%  FAILED: no node can process the rows; forge: no message for 8 s")
    assert len(made) == 2 and "ETA" not in made[1]


def test_the_chosen_run_shows_the_modes_of_its_policies_where_they_are_known() -> None:
    policies = (m.PolicyView("replays", "on"), m.PolicyView("first-shares", "advise"))
    known = [ln.plain(row) for row in runs_view.detail(RUNS[0], 0, 80, UNICODE, policies)]
    assert known[2].rstrip() == "policies  replays on  first-shares advise"
    assert {len(row) for row in known} == {80}
    assert len(runs_view.detail(RUNS[0], 0, 80, UNICODE)) == len(known) - 1
