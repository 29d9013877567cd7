"""Rollback in the conductor: what is refused, and what it leaves to the agent that takes the run up."""

import pytest
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor import views
from trainctl.node_agent.planning.durable import Rollback
from trainctl.protocol.messages import events as e


def run(step: int = 13, **checkpoint: object) -> Simulation:
    tables = {"checkpoint": {"every_steps": 5, "at_end": False, **checkpoint}}
    return Simulation(config(60, 12, **tables), durable(("a", "b"), 12)).begin().until_step(step)


@pytest.mark.parametrize(
    ("at", "args", "field", "reason"),
    [
        (13, {"step": 6}, "step", "no checkpoint of step 6; those kept are of steps 5, 10"),
        (13, {"steps": 9}, "steps", "no checkpoint at least 9 steps before step 13; those kept are of steps 5, 10"),
        (23, {"step": 10}, "step", "no checkpoint of step 10; those kept are of steps 15, 20"),
        (3, {"steps": 1}, "steps", "no checkpoint at least 1 step before step 3; none has been written"),
    ],
)
def test_a_checkpoint_that_is_not_there_is_refused_and_those_there_are_named(at, args, field, reason) -> None:
    simulation = run(at)
    end = simulation.ends[simulation.command("rollback", **args)]
    assert (end.state, end.field, end.reason) == ("rejected", field, reason)
    simulation.until_step(at + 2)
    assert simulation.conductor.state == "running"


def test_while_a_run_starts_that_is_why() -> None:
    simulation = Simulation(config(60, 12), durable(("a", "b"), 12)).begin()
    end = simulation.ends[simulation.command("rollback", steps=1)]
    assert (end.state, end.field) == ("rejected", "run")
    assert end.reason.startswith("the run is starting and has no such checkpoint")


@pytest.mark.parametrize(("args", "step"), [({"steps": 3}, 10), ({"steps": 4}, 5)])
def test_all_ranks_leave_and_what_is_wanted_is_journaled(args, step: int) -> None:
    simulation = run()
    end = simulation.ends[simulation.command("rollback", **args, skip_batches=2)]
    assert isinstance(end.made, e.CommandApplied)
    assert end.made.result == (
        f"the run will go back from step 13 to step {step} and skip 2 global batches after it; "
        "an event will name the positions"
    )
    simulation.run()
    assert simulation.ended is not None and simulation.conductor.goes_back
    assert simulation.journal.rollback == Rollback(step, 2)
    assert all(rank.gone for rank in simulation.ranks.values())
    seen = [views.rank_view(simulation.conductor, rank, None, "", None, 0.0) for rank in simulation.ranks]
    assert {(rank.state, rank.why) for rank in seen} == {("starting", f"rollback to step {step}")}


def test_an_agent_killed_before_its_ranks_have_left_has_a_successor_that_tells_them() -> None:
    simulation = run()
    simulation.crash_after = 2  # the journal and the outcome
    simulation.command("rollback", step=10)
    assert not simulation.conductor.goes_back
    simulation.run()
    assert simulation.ended is not None and simulation.conductor.goes_back
    assert simulation.journal.rollback == Rollback(10)


@pytest.mark.parametrize("are_gone", [False, True])
def test_a_stop_meanwhile_calls_the_rollback_off(are_gone: bool) -> None:
    simulation = run()
    simulation.command("rollback", step=10, skip_batches=2)
    if are_gone:
        simulation.run()
    end = simulation.ends[simulation.command("stop")]
    simulation.run()
    assert end.state == "applied" and not simulation.conductor.goes_back
    assert simulation.conductor.durable.rollback is None and simulation.journal.rollback is None


@pytest.mark.parametrize("nodes", [("a",), ("a", "b", "c"), ("a", "a", "b", "b")], ids=["one", "three", "pairs"])
def test_runs_of_any_nodes_and_ranks_go_back_skip_and_finish(nodes: tuple[str, ...]) -> None:
    tables = {"checkpoint": {"every_steps": 5, "at_end": False}}
    simulation = Simulation(config(30, 12, **tables), durable(nodes, 12)).begin().until_step(13)
    simulation.command("rollback", step=5, skip_batches=3)
    assert simulation.run().take_up()
    simulation.finish()
    check_ledger(simulation)
    cursors = {commit.step: commit.cursor for commit in simulation.commits}
    assert cursors == {step: 12 * (step if step <= 5 else step + 3) for step in range(1, 31)}


@pytest.mark.parametrize("stage", ["offering", "forming", "formed"])
@pytest.mark.parametrize("is_promoted", [False, True])
def test_a_new_lead_repeats_no_step_that_was_planned_before_the_run_went_back(is_promoted: bool, stage: str) -> None:
    simulation = run()
    simulation.command("rollback", step=5, skip_batches=2)
    assert simulation.run().take_up()
    simulation.until(lambda: simulation.conductor.stage == stage)
    simulation.promote(simulation.ranks[0]) if is_promoted else simulation.restart_agent()
    simulation.finish()
    check_ledger(simulation)
    assert simulation.commits[5].cursor == 12 * (6 + 2)
