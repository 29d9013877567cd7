"""What policies see, asked of the conductor: figures against thresholds, the next command; asking changes nothing."""

import pytest
from tests.node_agent.support.policy_facts import full
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.protocol import messages as m
from trainctl.protocol.config.policies import POLICIES

ALL_ON = {name: {"mode": "on"} for name in POLICIES}


def status(simulation: Simulation, name: str) -> m.PolicyStatus:
    return next(found for found in simulation.conductor.proposals.policy_statuses() if found.name == name)


def figure(simulation: Simulation, name: str, what: str) -> m.PolicyFigure:
    (found,) = [figure for figure in status(simulation, name).figures if what in figure.what]
    return found


def test_each_policy_sees_something_at_any_stage_of_a_run() -> None:
    simulation = Simulation(config(60, 12, policy=ALL_ON, evaluate={"every_steps": 5}), durable(("a", "b"), 12))
    for step in (0, 1, 9, 40):
        simulation = simulation.begin().until_step(step) if not simulation.started else simulation.until_step(step)
        found = simulation.conductor.proposals.policy_statuses()
        assert [one.name for one in found] == [*POLICIES]
        assert all(one.figures and one.why and one.mode == "on" for one in found), found


def test_the_command_that_it_is_about_to_send_is_named_with_its_reason() -> None:
    simulation = full(policy={"micro-batch": {"mode": "advise"}}).until_step(12)
    found = status(simulation, "micro-batch")
    assert (found.command, found.mode) == ("resize-batch micro=3 --node a", "advise")
    assert found.why.startswith("mean peak memory over 10 steps: 95 % of the cap")
    assert figure(simulation, "micro-batch", "highest peak").value == pytest.approx(0.95)


def test_asking_changes_nothing_of_what_the_run_does() -> None:
    asked, left_alone = full(), full()
    for simulation in (asked, left_alone):
        for step in range(1, 45):
            simulation.until_step(step)
            if simulation is asked:
                simulation.conductor.proposals.policy_statuses()
    assert asked.conductor.durable == left_alone.conductor.durable
    assert [event.text for event in asked.happened] == [event.text for event in left_alone.happened]


def test_a_gain_that_is_not_worth_a_command_is_seen_as_it_is() -> None:
    simulation = Simulation(config(60, 48, policy={"rebalance": {"mode": "on"}}), durable(("a", "b"), 48))
    simulation.ranks[1].speed = 97.0  # of 100
    simulation.begin().until_step(40)
    found = status(simulation, "rebalance")
    assert found.command == "" and found.figures[0].value == pytest.approx(0.0, abs=0.04)
    simulation.ranks[1].speed = 91.0
    simulation.until_step(50)
    assert figure(simulation, "rebalance", "gain").value == pytest.approx(0.05, abs=0.02)
