"""A run's cost by its record: who takes part, over drains, pauses, ends and agents; and what its steps carry."""

import msgspec
import pytest
from tests.node_agent.support.records import reading, step
from tests.node_agent.support.simulation import durable

from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.records.keys import NODE_TIMES_KEY, OWN_KEYS
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.runs.figures import RunCosts, close_times
from trainctl.protocol.batch import cost
from trainctl.protocol.config.cluster_file import Prices
from trainctl.protocol.record.paths import RunPaths

HOUR = 3600.0
PRICES = Prices("EUR", {"a": 2.0, "b": 1.0})
THREE = durable(("a", "b", "b"), 12).settings


@pytest.fixture
def recorder(tmp_path):
    (tmp_path / "run-1").mkdir()
    with RunDb(RunPaths(tmp_path / "run-1")) as made:
        yield made


def spent(costs: RunCosts, at: float) -> float:
    assert costs.cost is not None
    return cost.spent_by(costs.cost, at)


def test_a_node_costs_once_whatever_its_ranks_while_one_of_them_takes_part(recorder):
    costs = RunCosts(recorder, PRICES)
    costs.look(THREE, "starting", 0.0)
    one_out = share_edits.lose(THREE, 1).settings
    costs.look(one_out, "running", HOUR)
    both_out = share_edits.lose(one_out, 2).settings
    costs.look(both_out, "running", 2 * HOUR)
    assert (spent(costs, 2 * HOUR), spent(costs, 3 * HOUR)) == pytest.approx((6.0, 8.0))


def test_a_pause_costs_and_after_the_end_nothing_does(recorder):
    costs = RunCosts(recorder, PRICES)
    for hour, state in enumerate(("starting", "running", "pausing", "paused", "stopping", "stopped")):
        costs.look(THREE, state, hour * HOUR)
    assert spent(costs, 5 * HOUR) == spent(costs, 50 * HOUR) == pytest.approx(15.0)


def test_another_agent_and_another_lead_go_on_from_the_record(recorder):
    kept = []
    recorder.on_kept = kept.append
    RunCosts(recorder, PRICES).look(THREE, "running", 0.0)
    assert [item.key for item in kept] == [NODE_TIMES_KEY] and NODE_TIMES_KEY not in OWN_KEYS
    again = RunCosts(recorder, PRICES)
    again.look(THREE, "running", HOUR)
    assert spent(again, HOUR) == pytest.approx(3.0)


def test_a_price_that_comes_later_counts_for_all_of_the_run(recorder):
    before = RunCosts(recorder, Prices())
    assert before.look(THREE, "running", 0.0) is None
    assert before.with_cost(step(1)) == step(1)
    after = RunCosts(recorder, Prices("EUR", {"b": 1.0}))
    found = after.look(THREE, "running", HOUR)
    assert (found.spent, found.per_hour, found.unpriced) == (1.0, 1.0, ("a",))


def test_a_run_that_ended_with_its_agent_costs_nothing_until_it_is_resumed(recorder):
    RunCosts(recorder, PRICES).look(THREE, "running", 0.0)
    close_times(recorder, HOUR)
    resumed = RunCosts(recorder, PRICES)
    resumed.look(THREE, "starting", 24 * HOUR)
    assert spent(resumed, 24 * HOUR) == pytest.approx(3.0)
    close_times(recorder, 0.0)  # no step since it was resumed
    third = RunCosts(recorder, PRICES)
    third.look(THREE, "starting", 48 * HOUR)
    assert spent(third, 48 * HOUR) == pytest.approx(3.0)


def test_a_step_carries_the_cost_by_then_and_the_energy_of_the_machines_that_took_part(recorder):
    costs = RunCosts(recorder, PRICES)
    made = step(3)
    costs.look(THREE, "running", made.committed_at - HOUR)
    assert costs.with_cost(made).values == {**made.values, "cost": pytest.approx(3.0), "cost_per_hour": 3.0}
    for node, joules in (("a", 5.0), ("a", 7.0), ("b", 2.0), ("elsewhere", 100.0), ("b", None)):
        costs.read(msgspec.structs.replace(reading(1.0), node=node, energy_joules=joules))
    assert costs.with_cost(made).values["energy_joules"] == 9.0
