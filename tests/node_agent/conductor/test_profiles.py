"""Profiles at one boundary, and steps that wait for the samples of a growing file."""

from typing import Any

import pytest
from tests.node_agent.support.group_orders import texts
from tests.node_agent.support.simulated_ranks import RUN
from tests.node_agent.support.simulation import Simulation, check_ledger, config, durable

from trainctl.node_agent.conductor.restarts import PROFILE_SECONDS
from trainctl.node_agent.conductor.views import run_view
from trainctl.node_agent.planning.durable import TRACE_STEPS
from trainctl.node_agent.planning.share_edits import AWAY_SECONDS
from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e


def group(steps: int = 400) -> Simulation:
    return Simulation(config(steps, 12), durable(("a", "b"), 12)).begin().until_step(3)


def begun(simulation: Simulation, **args: Any) -> m.StepPlan:
    """The plan of an accepted profile, once it is reported."""
    id = simulation.command("profile", **args)
    simulation.until(lambda: id in simulation.ends)
    assert simulation.ends[id].state == "applied"
    return next(plan for plan in reversed(simulation.sent_plans) if plan.kind == "profile")


def written(plan: m.StepPlan, rank: int, **more: Any) -> m.ProfileWritten:
    first = plan.step + 2
    return m.ProfileWritten(
        run=RUN, rank=rank, seq=plan.seq, first_step=first, last_step=first + 1, file="t.gz", size_bytes=9, **more
    )


def profiles(simulation: Simulation) -> list[str]:
    return [text for text in texts(simulation) if "profile" in text]


def test_all_ranks_or_those_of_some_nodes_are_asked_at_one_boundary() -> None:
    simulation = group()
    plans = [begun(simulation, steps=2), begun(simulation, steps=1, nodes=["b"])]
    assert [[work.rank for work in plan.work] for plan in plans] == [[0, 1], [1]]
    assert [plan.profile_steps for plan in plans] == [2, 1]
    made = [end.made for end in simulation.ends.values()][-2:]
    assert made == [
        e.CommandApplied("", f"steps {plans[0].step + 2} to {plans[0].step + 3} on a, b; step {plans[0].step + 1} "
                         "warms up"),
        e.CommandApplied("", f"step {plans[1].step + 2} on b; step {plans[1].step + 1} warms up"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("args", "field", "reason"),
    [
        ({"nodes": ["b", "c"]}, "nodes", "no rank of c is in the group"),
        ({"steps": 20}, "steps", "the run has 16 steps left, and a profile of 20 needs 21: the first warms up"),
    ],
)
def test_what_cannot_be_is_refused(args: dict[str, Any], field: str, reason: str) -> None:
    simulation = group(steps=20)
    left = 20 - simulation.conductor.shared.planned_step
    end = simulation.ends[simulation.command("profile", **args)]
    assert (end.state, end.field, end.reason) == ("rejected", field, reason.replace("16", str(left)))


def test_an_outcome_is_recorded_once_however_often_it_is_repeated() -> None:
    simulation = group()
    plan = begun(simulation, steps=2)
    for _ in range(3):
        simulation.feed(written(plan, 0))
    simulation.feed(written(plan, 1, problem="the disk is full"))
    simulation.feed(written(plan, 1))
    first = plan.step + 2
    found = [event.command for event in simulation.happened if isinstance(event.data, e.Profiled | e.ProfileFailed)]
    assert found == [*plan.commands, *plan.commands]
    assert profiles(simulation) == [
        f"a profiled steps {first} to {first + 1}: 0.0 MB, loop paused 0 ms", "no profile from b: the disk is full"
    ]  # fmt: skip
    assert simulation.conductor.durable.profiling == {}


def test_a_profiled_rank_may_be_silent_for_longer_as_the_profiler_stops_its_heartbeats() -> None:
    simulation = group()
    limit = simulation.conductor.restarts.silence_limit_seconds
    assert limit(0, in_touch=True) == AWAY_SECONDS
    plan = begun(simulation, steps=2, nodes=["a"])
    assert (limit(0, in_touch=True), limit(0, in_touch=False)) == (PROFILE_SECONDS, AWAY_SECONDS)
    assert limit(1, in_touch=True) == AWAY_SECONDS
    simulation.feed(written(plan, 0))
    assert limit(0, in_touch=True) == AWAY_SECONDS


def test_profiled_steps_count_for_no_rate_and_a_lost_outcome_stops_that_for_some_steps_only() -> None:
    simulation = group()
    begun(simulation, steps=2)
    of = simulation.conductor.pipeline.rates
    before = of.timed([0, 1])
    step = simulation.conductor.progress.step
    for rank in simulation.ranks.values():
        rank.speed /= 10
    simulation.until_step(step + 10)
    assert of.timed([0, 1]) == before
    simulation.until_step(step + TRACE_STEPS + 30)
    assert of.timed([0, 1]) != before
    assert not simulation.conductor.durable.is_profiled(simulation.conductor.progress.step)


def test_a_rank_whose_trainer_ends_first_is_named() -> None:
    simulation = group()
    plan = begun(simulation, steps=2)
    simulation.kill(simulation.ranks[1])
    simulation.until(lambda: len(profiles(simulation)) == 1)
    simulation.feed(written(plan, 1))
    assert profiles(simulation) == ["no profile from b: its trainer ended before the trace was written"]


DATA = {"path": "/rows.jsonl", "kind": "rows", "growing": True}


def growing(nodes: tuple[str, ...] = ("a", "b"), chunks: int = 2, **tables) -> Simulation:
    """Chunks of 7 samples; steps of 8."""
    made = Simulation(config(6, data=DATA, **tables), durable(nodes))
    made.world.chunks = chunks
    return made.begin()


def test_steps_wait_for_the_samples_that_all_ranks_have():
    simulation = growing().run()
    assert len(simulation.commits) == 1  # 16 samples are needed for the second, 14 are there
    said = "waiting for data: 14 samples sealed, the next step needs 16"
    assert (simulation.conductor.reason, simulation.conductor.state) == (said, "running")
    view = run_view(simulation.conductor, 0.0, "", (), "a")
    assert (view.samples, view.reason) == (14, said)
    simulation.world.chunks = 5
    simulation.run()
    assert len(simulation.commits) == 4
    simulation.world.data_ended = True
    simulation.run()
    assert simulation.ended.state == "finished" and not simulation.conductor.reason
    check_ledger(simulation)


def test_one_rank_that_has_less_holds_all_back():
    simulation = growing()
    simulation.until(lambda: simulation.conductor.progress.step == 1)
    simulation.ranks[1].seal = lambda: None
    simulation.world.chunks = 3
    for _ in range(200):
        simulation.stride()
    assert simulation.conductor.progress.step == 1
    assert simulation.conductor.ranks[0].sealed.samples == 21


def test_no_rank_hangs_by_waiting():
    simulation = growing(group={"hung_seconds": 4.0}).run()
    for _ in range(100):
        simulation.tick(3.0)
        simulation.run()
    assert not simulation.conductor.hangs.hung and not simulation.conductor.hangs.late and not simulation.starts


def test_edits_take_effect_during_the_wait():
    simulation = growing().run()
    rate, batch = simulation.command("set-lr", value=0.5, schedule="set"), simulation.command("checkpoint")
    simulation.run()
    assert [simulation.ends[id].state for id in (rate, batch)] == ["applied", "applied"]
    smaller = simulation.command("set-global-batch", value=6)  # 14 samples are enough for that
    simulation.run()
    assert simulation.ends[smaller].state == "applied" and len(simulation.commits) == 2
    assert simulation.commits[1].learning_rate == 0.5 and simulation.commits[1].global_batch == 6
    simulation.world.data_ended = True
    simulation.run()
    check_ledger(simulation)
    simulation.check_commands()


def test_a_rank_with_other_data_is_refused_and_the_others_go_on():
    simulation = growing()
    simulation.until(lambda: simulation.conductor.progress.step == 1)
    simulation.ranks[1].other_from = 3
    simulation.world.chunks = 3
    simulation.until(lambda: simulation.conductor.ranks[0].sealed.chunks == 3 or len(simulation.commits) > 1)
    simulation.world.data_ended = True
    simulation.run()
    out = [rank for rank, setting in simulation.conductor.durable.settings.ranks.items() if setting.out == "failed"]
    assert len(out) == 1
    assert "the growing data of " in simulation.conductor.ranks[out[0]].why
    assert "differ within their first 3 chunks" in simulation.conductor.ranks[out[0]].why
    assert simulation.ended.state == "finished"


def test_ranks_that_begin_with_other_data_begin_no_run():
    simulation = Simulation(config(6, data=DATA), durable(("a", "b")))
    simulation.world.chunks, simulation.ranks[1].other_from = 1, 1
    simulation.started = True
    for rank in simulation.ranks.values():
        rank.seal()
    simulation.run()
    assert simulation.ended.state == "failed"
    assert "differ within their first 1 chunks" in simulation.conductor.reason
