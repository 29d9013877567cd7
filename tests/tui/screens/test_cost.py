"""Tests of what a run costs, in the head, on Runs and in `trainctl status`; without a price nothing is said."""

import msgspec
import pytest
from tests.tui.support.recorded import CLOCK, NOW, RUNS, run_view, snapshot, under_way
from tests.tui.support.states import state_after

from trainctl.protocol import messages as m
from trainctl.protocol.batch.cost import CostFigures
from trainctl.tui.cli import tables
from trainctl.tui.screens import header, runs_view
from trainctl.tui.state.table_fields import SortOrder
from trainctl.tui.state.table_schemas import RunRow
from trainctl.tui.state.view_state import ViewState
from trainctl.tui.text import formatting as f
from trainctl.tui.text import run_lines
from trainctl.tui.text import styled_line as ln
from trainctl.tui.text.run_lines import cost_figures, cost_pieces

COST = m.RunCost(currency="EUR", spent=12.0, at=NOW - 720, per_hour=2.0)
"""12.40 EUR now."""
PART = msgspec.structs.replace(COST, unpriced=("mbp",))
FIGURES = CostFigures("EUR", 12.4, 2.0, 18.8, 0.42, ())


def state_of(view: m.RunView) -> ViewState:
    return state_after(under_way(view))


def words(figures: CostFigures, **options: object) -> str:
    return ln.plain(ln.groups(cost_pieces(figures, "samples", **{"active": True, "energy": "n/a", **options}), 200))


def test_the_line_marks_what_has_no_price_and_says_what_is_unknown():
    assert words(FIGURES, active=False, energy="") == "cost 12.40 EUR  0.42 EUR per 1,000 samples"
    unknown = msgspec.structs.replace(FIGURES, to_end=None, per_1000=None)
    assert words(unknown) == "cost 12.40 EUR  n/a to the end  n/a per 1,000 samples  energy n/a"
    many = words(msgspec.structs.replace(FIGURES, unpriced=("a", "b", "c", "d", "e\x1b")))
    assert "cost >12.40 EUR  >18.80 EUR to the end" in many and "no price: a, b, c, 2 more  energy" in many


AMOUNTS = {12.4: "12.40", 0.0: "0.00", 0.00000312: "0.0000031", 1e-12: "1e-12", 1234.5: "1,234.50", 12345.6: "12,346"}


def test_amounts():
    assert [f.money(value, "EUR") for value in AMOUNTS] == [f"{text} EUR" for text in AMOUNTS.values()]
    assert {f.money(value, "EUR") for value in (None, float("nan"), float("inf"))} == {"n/a"}


def test_skipped_positions_are_no_samples_that_were_trained_on():
    run = run_view(1, cost=msgspec.structs.replace(COST, per_hour=0.0), cursor=1500, skipped=((1000, 300), (1600, 50)))
    assert [run.trained(cursor) for cursor in (None, 1000, 1100, 1300, 1650)] == [None, 1000, 1000, 1000, 1300]
    found = cost_figures(run, None, NOW, None)
    assert found is not None and found.per_1000 == pytest.approx(10.0)
    host = msgspec.structs.replace(READ, read_at=NOW, energy_joules=2400.0, energy_since_at=run.started_at)
    nodes = msgspec.structs.replace(run, ranks=(msgspec.structs.replace(run.ranks[0], node="a"),))
    assert run_lines.energy_figures([host], nodes, 1500).joules_per_1000 == pytest.approx(2000.0)


@pytest.mark.parametrize(("columns", "rows"), [(80, 2), (120, 4)])
def test_the_head_has_the_cost_where_there_is_a_price(columns, rows):
    def head(cost: m.RunCost | None) -> list[str]:
        state = state_of(run_view(1, cost=cost))
        return [ln.plain(row) for row in header.lines(state, CLOCK, columns, rows=rows)]

    priced = head(COST)
    assert any("cost 12.40 EUR" in row for row in priced) and {len(row) for row in priced} == {columns}
    assert "cost >12.40 EUR" in "\n".join(head(PART))
    assert not any("cost" in row for row in head(None))
    assert rows == 2 or all(words in priced[-1] for words in ("to the end", "per 1,000 samples", "energy"))


def test_the_status_has_a_line_for_the_cost_only_with_a_price():
    def cost(shown: m.Snapshot) -> list[str]:
        return [line for line in tables.status_text(shown).splitlines() if line.startswith("cost")]

    shown = snapshot(run_view(1, cost=PART))
    shown = msgspec.structs.replace(shown, at=NOW)
    (found,) = cost(shown)
    assert found.startswith("cost       >12.40 EUR  >") and "  no price: mbp  " in found
    assert cost(snapshot(run_view(1))) == []
    told = tables.figures_of(shown)
    assert told is not None and (told.spent, told.per_hour, told.unpriced) == (pytest.approx(12.4), 2.0, ("mbp",))
    assert tables.figures_of(snapshot(run_view(1))) is None


def test_runs_have_a_column_for_the_cost_where_one_has_a_price():
    run = msgspec.structs.replace(RUNS[0], cost=PART, cursor=2832)
    order = SortOrder()

    def lines(one: m.RunSummary, columns: int, *, priced: bool) -> tuple[str, str]:
        titles = ln.plain(runs_view.head(columns, order, priced=priced))
        return titles, ln.plain(runs_view.row(RunRow(one, 1.0, 1.0), False, False, CLOCK, columns, priced=priced))

    titles, row = lines(run, 120, priced=True)
    assert "COST" in titles and ">12.40 EUR" in row and "LEAD" in titles
    assert "n/a" in lines(RUNS[1], 120, priced=True)[1]
    assert "COST" not in lines(run, 120, priced=False)[0]
    assert lines(run, 80, priced=True) == lines(run, 80, priced=False)


def test_the_chosen_run_on_runs_says_all_of_its_cost():
    run, state = msgspec.structs.replace(RUNS[0], cost=COST, cursor=2832), state_of(run_view(1, cost=COST))
    (line,) = runs_view.costs(run, state, CLOCK, 120)
    text = ln.plain(line).rstrip()
    assert text.startswith("cost 12.40 EUR  ") and "to the end" in text and "4.38 EUR per 1,000 samples" in text
    assert runs_view.costs(RUNS[0], state, CLOCK, 120) == []
    part = [
        ln.plain(line).rstrip() for line in runs_view.costs(msgspec.structs.replace(run, cost=PART), state, CLOCK, 80)
    ]
    assert len(part) == 2 and "per 1,000 samples" in part[0] and part[1] == "no price: mbp"
    ended = msgspec.structs.replace(run, state="stopped", cost=msgspec.structs.replace(COST, per_hour=0.0), run="other")
    assert ln.plain(runs_view.costs(ended, state, CLOCK, 120)[0]).rstrip() == (
        "cost 12.00 EUR  4.24 EUR per 1,000 samples"
    )


# ---------------------------------------------------------------- energy

READ = m.HostReading(
    node="a",
    read_at=4600.0,
    cpu_percent=None,
    memory_used_bytes=None,
    memory_total_bytes=None,
    disk_free_bytes=None,
    energy_joules=7200.0,
    energy_since_at=1000.0,
)


def used(*hosts: m.HostReading, state: m.RunState = "running") -> run_lines.EnergyFigures:
    rank = msgspec.structs.replace(run_view(1).ranks[0], node="a")
    ranks = (rank, msgspec.structs.replace(rank, rank=1, node="b"))
    return run_lines.energy_figures(hosts, run_view(1, ranks=ranks, started_at=1000.0, state=state), 4000)


def test_energy_per_thousand_needs_the_whole_run_on_every_machine():
    other = msgspec.structs.replace(READ, node="b")
    assert used(READ, other) == run_lines.EnergyFigures(14_400.0, 0.0, 3600.0)
    assert run_lines.energy_text([READ, other], 3600.0) == "4.0 Wh (1 Wh per 1,000)"
    assert used(READ).joules_per_1000 is None
    for change in ({"energy_since_at": 2000.0}, {"energy_gap_seconds": 600.0}, {"energy_joules": None}):
        assert used(READ, msgspec.structs.replace(other, **change)).joules_per_1000 is None
    later = msgspec.structs.replace(READ, energy_since_at=2000.0)
    assert used(later, state="stopped").joules is None, "an ended run's count began with it"
    assert used(later).joules == used(READ, state="stopped").joules == 7200.0


def test_a_gap_in_the_readings_is_named_and_what_was_not_read_is_unknown():
    def text(**changes: object) -> str:
        return run_lines.energy_text([msgspec.structs.replace(READ, **changes)])

    assert (text(), text(energy_joules=36e6), text(energy_gap_seconds=30.0)) == ("2.0 Wh", "10.00 kWh", "2.0 Wh")
    assert text(energy_gap_seconds=600.0) == "over 2.0 Wh (10m 00s unread)"
    assert {text(energy_joules=None), text(energy_since_at=None), run_lines.energy_text([])} == {"n/a"}
    assert run_lines.energy_text([READ, READ, msgspec.structs.replace(READ, energy_joules=None)]) == "4.0 Wh"
