"""The table of the fleet: filtered and sorted, nodes of several devices, and ranks that are late, out or silent."""

import dataclasses

import msgspec
from tests.tui.support.driving import body, running, until
from tests.tui.support.pictures import SEVERAL, of_two_nodes
from tests.tui.support.recorded import (
    CLOCK,
    CONNECTED,
    NOW,
    Recorded,
    snapshot,
    source_of,
)  # fmt: skip
from tests.tui.support.states import FLEET, state_after

from trainctl.protocol import messages as m
from trainctl.tui.app.app import TrainctlApp
from trainctl.tui.screens import fleet_table
from trainctl.tui.screens.node import NodeScreen
from trainctl.tui.state import rank_rows, reducer
from trainctl.tui.text import styled_line as ln
from trainctl.tui.widgets.line_view import Lines


def nodes(app: TrainctlApp) -> list[str]:
    """The table's first column down to the charts."""
    rows = body(app).splitlines()
    start = next(at for at, row in enumerate(rows) if row.startswith("NODE"))
    end = next(at for at, row in enumerate(rows) if row.startswith("─ loss"))
    return [row.split()[0] for row in rows[start + 1 : end] if row.strip()]


def note(app: TrainctlApp) -> str:
    return app.screen.query_one("#filter-note", Lines).shown[0]


async def test_a_filter_shows_its_errors_as_it_is_typed_and_the_last_good_one_stays() -> None:
    async with running(source_of(4)) as (pilot, app):
        assert nodes(app) == ["studio", "mbp", "forge", "mini"]
        await pilot.press("slash", *"tok/s<2k")
        assert nodes(app) == ["mbp"]
        assert "3 of 4 hidden" in note(app)
        await pilot.press(*" age<3x")
        assert note(app).startswith("column 14: '3x' is not a valid time; age takes 3s, 200ms")
        assert nodes(app) == ["mbp"]
        await pilot.press("enter")
        assert app.screen.query_one("#filter").has_focus, "what can't be understood isn't kept"
        await pilot.press("backspace", "s", "enter")
        await pilot.press("slash", "end", *" -mbp")
        assert "the filter hides all ranks" in body(app)
        await pilot.press("enter", "colon", "escape")
        assert "hidden" in note(app), "that escape was for the : line"
        await pilot.press("escape")
        assert nodes(app) == ["studio", "mbp", "forge", "mini"]
        assert not app.screen.query_one("FilterBar").display


async def test_the_fleet_is_sorted_by_keys_and_by_its_heads() -> None:
    async with running(source_of(4)) as (pilot, app):
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


async def test_right_opens_a_node_and_left_closes_it() -> None:
    async with running(Recorded(list(SEVERAL))) as (pilot, app):
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


async def test_a_click_on_a_row_opens_its_node() -> None:
    async with running(source_of(4)) as (pilot, app):
        row = next(at for at, text in enumerate(app.screen.query_one("#body", Lines).shown) if text.startswith("NODE"))
        await pilot.click("#body", offset=(3, row + 2))
        await until(pilot, lambda: app.screen.name == "node")
        assert app.selected == 1


def test_a_node_of_several_devices_is_one_row_of_sums_that_opens_into_its_ranks() -> None:
    state = state_after(SEVERAL)
    rows = fleet_table.arranged(rank_rows.rows(state, CLOCK), fleet_table.Arrangement())
    assert [row.view.node for row in rows] == ["studio", "forge", "mini"]
    both, alone = rows[0], state.ranks
    assert both.members == (0, 1)
    assert both.view.share == 25
    assert both.own_rate is not None
    assert abs(both.own_rate - 4535) < 25
    assert both.step is not None
    assert both.step.peak_or_held_bytes == sum(alone[rank].value.peak_or_held_bytes or 0 for rank in (0, 1))
    assert both.passes is None, "their micro-batches are unlike"
    opened = fleet_table.Arrangement(opened=frozenset({"studio"}))
    text = [ln.plain(row) for row in fleet_table.lines(state, CLOCK, 160, total=True, wanted=opened, selected=1)]
    assert [row.split()[0] for row in text[1:]] == ["▾", ":0", ":1", "forge", "mini", "FLEET"]
    assert {len(row) for row in text} == {160}


def test_the_worst_of_a_node_s_ranks_is_what_the_node_is() -> None:
    view = of_two_nodes()
    hung = msgspec.structs.replace(view.ranks[1], state="hung", why="gets on with nothing", since_at=NOW - 12)
    state = state_after(
        [CONNECTED, snapshot(msgspec.structs.replace(view, ranks=(view.ranks[0], hung, *view.ranks[2:])))]
    )
    row = fleet_table.arranged(rank_rows.rows(state, CLOCK), fleet_table.Arrangement())[0]
    assert row.view.state == "hung"
    assert row.view.why == "rank 1: gets on with nothing"


def test_metrics_that_a_person_wants_have_columns_where_there_is_room() -> None:
    state = FLEET
    for rank, seen in FLEET.ranks.items():
        values = {**seen.value.values, "user:reward": 0.25 + rank, "user:share": 0.5}
        own = msgspec.structs.replace(seen.value, values=values, step=18_241, boot=state.boot, seq=state.seq + 1)
        state = reducer.apply(state, own, CLOCK.at_monotonic)
    assert state.own_metrics == ("user:reward", "user:share")

    def table(columns: int, *metrics: str) -> list[str]:
        wanted = fleet_table.Arrangement(metrics=metrics)
        rows = [ln.plain(row) for row in fleet_table.lines(state, CLOCK, columns, total=True, wanted=wanted)]
        assert {len(row) for row in rows} == {columns}
        return rows

    wide = table(220, "user:reward", "user:share", "busy_seconds", "own_loss", "user:absent")
    assert all(word in wide[0] for word in ("reward", "share", "busy seconds", "absent"))
    assert "1.250" in wide[2] and wide[0].count("LOSS") == 1
    end = wide[0].index("share") + len("share")
    assert wide[2][:end].endswith(" 0.500") and not wide[5][end - 7 : end].strip(), "the sum of shares is of samples"
    assert table(149, "user:reward") == table(149)
    many = table(190, *(f"user:metric_{number}" for number in range(40)))[0]
    assert "metric 0" in many and "metric 30" not in many and "STEP" in many
    assert "user:reward" in fleet_table.sortable(state, CLOCK, 220, ("user:reward",))


def test_a_rank_that_says_nothing_is_dimmed_with_its_age() -> None:
    late = dataclasses.replace(CLOCK, at_monotonic=CLOCK.at_monotonic + 20)
    beat = m.Heartbeat(
        node="studio", at=NOW + 20, step_age_seconds=20, loop_lag_seconds=0, boot=FLEET.boot, seq=FLEET.seq
    )
    state = reducer.apply(FLEET, beat, late.at_monotonic)
    row = fleet_table.lines(state, late, 80, total=False)[1]
    assert ln.plain(row).split()[-1] == "20s"
    assert {piece.role for piece in row if piece.text.strip()} <= {"old", "warning"}
