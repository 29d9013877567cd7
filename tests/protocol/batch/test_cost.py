"""What a run costs: against the same sum made second by second, over changes of who takes part, and with no price."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol import messages as m
from trainctl.protocol.batch import cost
from trainctl.protocol.config.cluster_file import Prices

NODES = ("a", "b", "c")
PRICES = Prices("EUR", {"a": 2.0, "b": 0.5})
histories = st.lists(st.tuples(st.integers(0, 5000), st.frozensets(st.sampled_from(NODES))), max_size=12)
"""Seconds until a change, and who takes part from then on."""


def followed(history: list[tuple[int, frozenset[str]]]) -> tuple[cost.Times, int]:
    times, at = cost.counted((), {"a"}, 0.0), 0
    for seconds, taking_part in history:
        at += seconds
        times = cost.counted(times, taking_part, at)
    return times, at


def seconds_of(history: list[tuple[int, frozenset[str]]], node: str) -> int:
    before = [frozenset("a"), *(taking_part for _, taking_part in history)]
    return sum(seconds for (seconds, _), who in zip(history, before, strict=False) if node in who)


@given(histories, st.integers(0, 5000))
def test_each_node_costs_its_price_for_the_time_that_it_took_part(history, later):
    times, at = followed(history)
    found = cost.run_cost(times, PRICES, at)
    wanted = sum(price * seconds_of(history, node) / 3600 for node, price in PRICES.per_hour.items())
    assert found.spent == pytest.approx(wanted)
    now = history[-1][1] if history else {"a"}
    assert found.per_hour == sum(PRICES.per_hour.get(node, 0.0) for node in now)
    assert cost.spent_by(found, at + later) == pytest.approx(wanted + found.per_hour * later / 3600)
    assert found.unpriced == (("c",) if any("c" in who for _, who in history) else ())
    assert cost.counted(times, now, at + later) == times, "the same nodes again"


@given(histories, st.integers(1, 10**6))
def test_an_ended_run_costs_no_more_and_a_resumed_one_goes_on_from_there(history, away):
    times, at = followed(history)
    over = cost.counted(times, (), at)
    spent = cost.run_cost(over, PRICES, at).spent
    again = cost.run_cost(cost.counted(over, {"a"}, at + away), PRICES, at + away)
    assert (again.spent, cost.spent_by(again, at + away + 3600)) == pytest.approx((spent, spent + 2.0))


def test_a_clock_that_went_back_takes_nothing_away():
    times = cost.counted(cost.counted((), {"a"}, 5000.0), (), 1400.0)
    assert cost.run_cost(times, PRICES, 1400.0).spent == 0
    found = m.RunCost(currency="EUR", spent=3.0, at=5000.0, per_hour=2.0)
    assert cost.spent_by(found, 1400.0) == 3.0


def test_without_a_price_for_any_of_its_nodes_a_run_has_no_cost_and_nothing_is_a_price():
    assert cost.run_cost(cost.counted((), {"c", "d"}, 0.0), PRICES, 3600.0) is None
    free = cost.run_cost(cost.counted((), {"a"}, 0.0), Prices("EUR", {"a": 0.0}), 3600.0)
    assert (free.spent, free.unpriced) == (0.0, ())


def test_figures_are_as_of_now_and_to_the_last_step():
    run = m.RunCost(currency="EUR", spent=3.0, at=1000.0, per_hour=1.8, unpriced=("c",))
    assert cost.figures(run, 3000.0, 7200.0, 16_000) == cost.CostFigures(
        currency="EUR", spent=4.0, per_hour=1.8, to_end=3.6, per_1000=0.25, unpriced=("c",)
    )
    for samples in (None, 0):
        unknown = cost.figures(run, 1000.0, None, samples)
        assert (unknown.spent, unknown.to_end, unknown.per_1000) == (3.0, None, None)
    assert cost.spent_by(cost.ended(run, 3000.0), 10**6) == 4.0, "it ended with its agent"
    assert cost.spent_by(cost.ended(run, 0.0), 10**6) == 3.0
