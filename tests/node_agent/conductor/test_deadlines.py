"""Tests of what a run waits for and for how long: silent nodes, first sums, parts that hang, and stalls."""

import msgspec
import pytest
from tests.node_agent.support.group_orders import group, hang, hang_in_its_part, rows, texts, tick
from tests.node_agent.support.simulated_ranks import RUN, SimRank, SimWorld
from tests.node_agent.support.simulation import Simulation, config, durable

from trainctl.node_agent.conductor.deadlines import FIRST_TIMES, LONGEST_TIMES, StallDetector
from trainctl.node_agent.conductor.state import ConductorState, Progress
from trainctl.node_agent.planning.rank_models import write_seconds
from trainctl.protocol import messages as m


def test_a_stop_whose_checkpoint_hangs_ends_and_names_who_hangs():
    simulation = group().begin().until_step(4)
    stop = simulation.command("stop")
    simulation.until(lambda: simulation.sent_plans[-1].kind == "checkpoint").talk()
    hang(simulation, 1)
    tick(simulation, 29)
    assert stop not in simulation.ends
    tick(simulation, 3)
    assert simulation.ends[stop].state == "failed"
    assert "b did not answer for 3" in simulation.ends[stop].reason
    assert simulation.conductor.final == "stopped"


def test_a_stop_waits_for_a_large_checkpoint():
    simulation = group()
    for rank in simulation.ranks.values():
        rank.parameters = 1_000_000_000
    simulation.begin().until_step(4)
    stop = simulation.command("stop")
    simulation.until(lambda: simulation.sent_plans[-1].kind == "checkpoint").talk()
    hang(simulation, 0)
    tick(simulation, 2 * write_seconds(1_000_000_000))
    assert stop not in simulation.ends
    simulation.ranks[0].hung = False
    simulation.run()
    assert simulation.ends[stop].state == "applied"


def test_a_stop_that_another_agent_took_ends_though_a_node_never_comes_back():
    simulation = group().begin().until_step(4)
    simulation.lose(simulation.ranks[1])
    stop = simulation.command("stop")
    simulation.restart_agent()
    assert simulation.conductor.stage == "loading"
    tick(simulation, 80)
    assert simulation.ends[stop].state == "applied"
    assert any(text.startswith("b is lost") for text in texts(simulation))
    assert simulation.ended.state == "stopped"


def test_a_silent_node_is_not_admitted_and_the_others_train_on():
    simulation = group(steps=60).begin().until_step(2)
    drain = simulation.command("drain", node="c")
    simulation.until(lambda: drain in simulation.ends)
    simulation.disconnect(simulation.ranks[2])
    for _ in range(7):
        simulation.tick(1.0)
    admit = simulation.command("admit", node="c")
    assert (simulation.ends[admit].state, simulation.ends[admit].field) == ("rejected", "node")
    assert simulation.ends[admit].reason == "c's trainer has been silent for 7 s"
    simulation.reconnect(simulation.ranks[2])
    simulation.talk()
    again = simulation.command("admit", node="c")
    assert simulation.run().ended.state == "finished"
    assert simulation.ends[again].state == "applied"


@pytest.mark.parametrize(("parameters", "waits", "overdue"), [(20_000_000, 20, 10), (1000, 8, 3)])
def test_the_first_sum_is_given_the_time_of_the_models_size(parameters, waits, overdue):
    """All ranks have accumulated the first step; c hangs in the sum."""
    simulation = group()
    for rank in simulation.ranks.values():
        rank.parameters = parameters
    simulation.begin().until(lambda: all(rank.accumulated for rank in simulation.ranks.values()))
    simulation.ranks[2].failed = True
    tick(simulation.run(), waits)
    assert simulation.conductor.stage == "formed"
    tick(simulation, overdue)
    assert "g1.1 left: c did not finish the sum of step 1 in time" in texts(simulation)


def slow(simulation: Simulation) -> list[str]:
    return [text for text in texts(simulation) if "not finished" in text]


def test_a_rank_that_hangs_in_its_part_of_a_step_is_named_once():
    simulation = group().begin().until_step(4)
    hang_in_its_part(simulation, 2)
    tick(simulation, 29)
    assert not slow(simulation)
    tick(simulation, 60)
    step = simulation.conductor.progress.step + 1
    (told,) = slow(simulation)
    assert told.startswith(f"c has not finished its part of step {step} after 3")
    assert simulation.conductor.stage == "formed"
    simulation.ranks[2].hung = False
    assert simulation.run().ended.state == "finished"


def test_ten_times_the_usual_is_waited_before_a_slow_part_is_told():
    simulation = group().begin()
    for rank in simulation.ranks.values():
        rank.step_seconds = 6.0
    simulation.until_step(4)
    hang_in_its_part(simulation, 2)
    tick(simulation, 59)
    assert not slow(simulation)
    tick(simulation, 2)
    assert len(slow(simulation)) == 1


@pytest.mark.parametrize(
    ("kind", "words"), [("measure", "measurement of initial shares"), ("checkpoint", "checkpoint at step 4")]
)
def test_a_rank_that_hangs_beside_training_is_named(kind, words):
    simulation = group(
        group={"first_shares": "timed" if kind == "measure" else "even"},
        checkpoint={"every_steps": 4 if kind == "checkpoint" else 0},
    )
    simulation.begin().until(lambda: simulation.sent_plans and simulation.sent_plans[-1].kind == kind)
    hang(simulation, 1)
    tick(simulation, 40)
    (told,) = slow(simulation)
    assert told.startswith(f"b has not finished its part of the {words} after 3")


def micros(simulation: Simulation, step: int) -> dict[int, int]:
    plan = [plan for plan in simulation.sent_plans if (plan.kind, plan.step) == ("train", step)][-1]
    return {work.rank: work.micro_batch for work in plan.work}


def test_a_micro_batch_that_was_run_in_less_is_itself_again_with_its_share():
    simulation = group(steps=60).begin().until_step(2)
    less = simulation.command("rebalance", shares={"a": 10, "b": 1, "c": 1})
    simulation.until(lambda: less in simulation.ends)
    end = simulation.ends[less]
    assert micros(simulation, end.step) == {0: 4, 1: 1, 2: 1}
    more = simulation.command("rebalance", shares={"a": 4, "b": 4, "c": 4})
    simulation.run()
    step = simulation.ends[more].step
    assert (micros(simulation, step), rows(simulation, step)) == ({0: 4, 1: 4, 2: 4}, {0: 4, 1: 4, 2: 4})


def test_what_ran_out_of_memory_stays_small_whatever_the_share_becomes():
    simulation = group(steps=60).begin().until_step(2)
    less = simulation.command("rebalance", shares={"a": 6, "b": 3, "c": 3})
    simulation.until(lambda: less in simulation.ends)
    simulation.until(
        lambda: any(isinstance(said, m.Report) and said.kind == "train" for said in simulation.ranks[1].up)
    )
    said = simulation.ranks[1].up
    at = next(index for index, report in enumerate(said) if isinstance(report, m.Report) and report.kind == "train")
    said[at] = msgspec.structs.replace(said[at], replays=1, micro_batch=1)
    simulation.run(60)
    assert any("micro-batch: b 3 → 1 (the rank ran out of memory" in text for text in texts(simulation))
    more = simulation.command("rebalance", shares={"a": 4, "b": 4, "c": 4})
    simulation.run()
    assert micros(simulation, simulation.ends[more].step) == {0: 4, 1: 1, 2: 4}


LEAST, LOAD = 100.0, 600.0


def alive(progress: int | None, phase: str = "forward", step: int = 5) -> m.Alive:
    return m.Alive(run="r", rank=0, generation=None, step=step, phase=phase, progress=progress)


class Stalls(StallDetector):
    """One of a run whose rank 0 has loaded a model."""

    def __init__(self, hung_seconds: float = LEAST, parameters: int = 1000) -> None:
        tables = {"run": {"name": RUN, "steps": 10, "load_seconds": LOAD}, "group": {"hung_seconds": hung_seconds}}
        self.state = ConductorState(RUN, config(10, 12, **tables), durable(("a", "b"), 12), Progress())
        self.state.ranks[0].ready = msgspec.structs.replace(SimRank(0, SimWorld(0)).ready(), parameters=parameters)
        super().__init__(self.state)

    def beat(self, message: m.Alive, at: float) -> None:
        self.state.now = at
        self.heard(message)


def heard(made: Stalls, times: list[float], progress: int | None = 7, phase: str = "forward") -> Stalls:
    for at in times:
        made.beat(alive(progress, phase), at)
    return made


def test_it_grows_with_each_heartbeat_that_brings_nothing_new():
    made = heard(Stalls(), [10.0, 11.0, 12.0, 13.5])
    assert (made.seconds(0), made.is_at_work(0)) == (3.5, True)
    made.beat(alive(8), 14.0)
    assert made.seconds(0) == 0.0


def test_time_in_which_nothing_was_heard_is_nobodys_standstill():
    """Neither that of a machine that slept, nor that of an agent that was stopped and then reads all at once."""
    slept = heard(Stalls(), [10.0, 11.0, 3000.0])
    assert slept.seconds(0) <= 4.0
    stopped = heard(Stalls(), [10.0, *[3000.0] * 50])
    assert stopped.seconds(0) <= 3.0


def test_of_a_heartbeat_without_the_number_nothing_is_known():
    made = heard(Stalls(), [float(second) for second in range(500)], progress=None)
    assert (made.seconds(0), made.is_at_work(0)) == (0.0, False)


def test_the_first_of_its_kind_may_take_longer_and_again_after_another_start():
    made = Stalls()
    assert made.limit_seconds(0, "train", 0.1) == FIRST_TIMES * LEAST
    made.done(0, "train")
    assert made.limit_seconds(0, "train", 0.1) == LEAST
    assert made.limit_seconds(0, "evaluate", 0.1) == FIRST_TIMES * LEAST
    assert made.limit_seconds(1, "train", 0.1) == FIRST_TIMES * LEAST
    made.forget(0)
    assert made.limit_seconds(0, "train", 0.1) == FIRST_TIMES * LEAST


def test_what_was_measured_raises_the_limit():
    made = Stalls()
    made.done(0, "train")
    made.done(0, "checkpoint")
    assert made.limit_seconds(0, "train", 60.0) == LONGEST_TIMES * 60.0
    large = Stalls(parameters=1_000_000_000)
    assert large.limit_seconds(0, "checkpoint", 0.1) >= 3600.0
    heard(made, [float(second) for second in range(51)])  # 50 s in one phase, and then it got on
    made.beat(alive(8), 51.0)
    assert made.limit_seconds(0, "train", 0.1) == LONGEST_TIMES * 50.0


@pytest.mark.parametrize("reports_first", [False, True])
def test_a_first_step_that_compiles_raises_no_limit_and_a_later_stall_only_that_of_its_rank_and_kind(reports_first):
    """The report of a plan may come before the heartbeat that shows its stall's end."""
    made = Stalls()
    made.done(1, "train")
    heard(made, [float(second) for second in range(302)])
    if reports_first:
        made.done(0, "train")
    made.beat(alive(8), 302.0)
    made.done(0, "train")
    made.done(0, "evaluate")
    assert made.limit_seconds(0, "train", 0.1) == made.limit_seconds(1, "train", 0.1) == LEAST
    for second in range(400, 431):
        made.beat(alive(9), float(second))
    made.beat(alive(10), 431.0)
    assert made.limit_seconds(0, "train", 0.1) == LONGEST_TIMES * 30.0
    assert made.limit_seconds(0, "evaluate", 0.1) == made.limit_seconds(1, "train", 0.1) == LEAST
    made.forget(0)
    made.done(0, "train")
    assert made.limit_seconds(0, "train", 0.1) == LEAST


def test_a_wait_for_others_is_no_measure():
    made = Stalls()
    made.done(0, "train")
    heard(made, [float(second) for second in range(500)], phase="idle")
    made.beat(alive(8), 500.0)
    assert made.limit_seconds(0, "train", 0.1) == LEAST


def test_a_large_model_may_load_for_long():
    assert Stalls(1.0).load_limit_seconds() == LOAD
    assert Stalls(parameters=1_000_000_000).load_limit_seconds() >= 1000.0
