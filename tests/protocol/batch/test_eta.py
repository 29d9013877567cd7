"""Tests of what a run costs and when it will be done: against sums made second by second, and runs known to their
end."""

import math
import random
import statistics
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.tiers import scale

from trainctl.protocol import messages as m
from trainctl.protocol.batch import cost
from trainctl.protocol.batch.eta import LEVEL_STEPS, WARM_UP_STEPS, Eta, EtaFacts, Schedule, TimeLeft
from trainctl.protocol.config.cluster_file import Prices

NOISE = 0.05
"""Standard deviation of a step's seconds, relative."""
LONG_STEPS = 0.01
"""Part of the steps that take much longer."""
FAULTS = 3.0
"""Mean number of faults in a run."""
BACK = 0.05
"""Part of the faults after which the run goes back to its last checkpoint."""


class Happening(NamedTuple):
    """One step, or what happens after it."""

    kind: Literal["train", "evaluate", "checkpoint", "fault"]
    step: int  # last committed step, after this
    seconds: float


class SimulatedRun(NamedTuple):
    """All that happens in a run, in order, and what is known of it beforehand."""

    steps: int
    schedules: dict[str, Schedule]
    happenings: tuple[Happening, ...]

    def at(self, part: float) -> int:
        """Count the happenings until this part of the steps is first committed."""
        return next(count for count, one in enumerate(self.happenings, 1) if one.step >= part * self.steps)


def simulated(seed: int) -> SimulatedRun:
    chance = random.Random(seed)
    steps = round(2000 * 10 ** chance.random())
    usual = 3600 * 24 ** chance.random() / steps
    evaluation, checkpoint = usual * chance.uniform(5, 40), chance.uniform(2, 20)
    schedules = {
        # Before the first one, an evaluation's time is guessed within a factor of 2, a checkpoint's not at all.
        "evaluate": Schedule(chance.randint(100, 500), True, evaluation * 2 ** chance.uniform(-1, 1)),
        "checkpoint": Schedule(chance.randint(250, 1000), True),
    }
    durations = {"evaluate": evaluation, "checkpoint": checkpoint}
    return SimulatedRun(steps, schedules, tuple(_happenings(chance, steps, usual, schedules, durations)))


def _happenings(
    chance: random.Random, steps: int, usual: float, schedules: dict[str, Schedule], durations: dict[str, float]
) -> Iterator[Happening]:
    drift, wander = 0.0, chance.uniform(0.01, 0.05) / math.sqrt(steps)
    step, checkpoint_step, highest = 0, 0, 0
    while step < steps:
        step += 1
        drift += chance.gauss(0, wander)
        seconds = usual * math.exp(drift) * max(chance.gauss(1, NOISE), 0.5)
        if chance.random() < LONG_STEPS:
            seconds *= chance.uniform(2, 10)
        yield Happening("train", step, seconds * _warm_up(step, highest))
        for kind, schedule in schedules.items():
            if step % schedule.every_steps == 0 or step == steps:
                yield Happening(kind, step, durations[kind] * max(chance.gauss(1, 0.1), 0.3))
                checkpoint_step = step if kind == "checkpoint" else checkpoint_step
        is_new, highest = step > highest, max(step, highest)
        if is_new and chance.random() < FAULTS / steps:
            step = checkpoint_step if chance.random() < BACK else step
            yield Happening("fault", step, chance.uniform(20, 120))


def _warm_up(step: int, highest: int) -> float:
    """Factor of a run's first steps: devices compile and warm up."""
    return 1.0 if highest >= step or step > 10 else 20.0 if step == 1 else 1.5


SEEDS = scale("estimated runs")
FIRST_SEED = 10_000
"""The distances of best and worst were chosen by runs of seeds below 200."""
EVALUATIONS = {"evaluate": Schedule(100, True, 8.0)}


def fed(eta: Eta, run: SimulatedRun, first: int, last: int) -> Eta:
    for one in run.happenings[first:last]:
        if one.kind == "train":
            eta.step(one.step, one.seconds)
        elif one.kind == "fault":
            eta.fault(one.step, one.seconds)
        else:
            eta.plan(one.kind, one.seconds)
    return eta


def left(eta: Eta, schedules: dict[str, Schedule] | None = None) -> TimeLeft:
    found = eta.left(schedules or {})
    assert found is not None
    return found


def steps(eta: Eta, first: int, last: int, seconds: float = 1.0) -> Eta:
    for step in range(first, last + 1):
        eta.step(step, seconds)
    return eta


def test_simulated_runs_end_between_best_and_worst() -> None:
    told, took = [], []
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        run = simulated(seed)
        tenth = run.at(0.1)
        told.append(left(fed(Eta(run.steps), run, 0, tenth), run.schedules))
        took.append(sum(one.seconds for one in run.happenings[tenth:]))
    errors = [abs(one.expected / seconds - 1) for one, seconds in zip(told, took, strict=True)]
    covered = statistics.fmean(one.best <= seconds <= one.worst for one, seconds in zip(told, took, strict=True))
    widths = [(one.worst - one.best) / one.expected for one in told]
    print(
        f"\n{SEEDS} runs at 10 %: median error {statistics.median(errors):.3f}, covered {covered:.3f},"
        f" {statistics.fmean(error <= 0.05 for error in errors):.3f} within 5 %, width {statistics.median(widths):.3f}"
    )
    assert statistics.median(errors) <= 0.05
    # Of few runs chance alone misses more.
    assert covered >= (0.9 if SEEDS >= 200 else 0.75)
    assert statistics.median(widths) <= (0.15 if SEEDS >= 200 else 0.2)


def test_a_long_step_in_a_hundred_counts_as_often_as_it_comes() -> None:
    eta, chance = Eta(10_000), random.Random(1)
    for step in range(1, 2001):
        eta.step(step, 60.0 if step % 100 == 0 else chance.gauss(1, 0.05))
    assert left(eta).expected == pytest.approx(8000 * (1 + 0.59), rel=0.05)
    eta, chance = Eta(10_000), random.Random(2)
    for step in range(1, 1001):  # texts of all lengths are no exceptions
        eta.step(step, chance.uniform(0.2, 1.8))
    assert left(eta).expected == pytest.approx(9000, rel=0.1)
    assert statistics.fmean(eta.facts.blocks) == pytest.approx(1, abs=0.1)


def test_the_first_steps_do_not_count_for_long() -> None:
    eta = Eta(1000)
    eta.step(1, 30.0)
    assert left(eta).worst > left(eta).expected
    steps(eta, 2, WARM_UP_STEPS, 3.0)
    steps(eta, WARM_UP_STEPS + 1, 100)
    assert left(eta).expected == pytest.approx(900, rel=0.1)


@pytest.mark.parametrize("seconds", [0.25, 4.0])
def test_a_new_level_is_soon_believed(seconds: float) -> None:
    eta = steps(Eta(1000), 1, 300)
    steps(eta, 301, 300 + LEVEL_STEPS, seconds)
    assert eta.usual_seconds == seconds
    assert left(eta).expected == pytest.approx(seconds * (700 - LEVEL_STEPS), rel=0.15)
    eta.change()
    steps(eta, 301 + LEVEL_STEPS, 330 + LEVEL_STEPS, 1.3)
    assert left(eta).expected == pytest.approx(1.3 * (670 - LEVEL_STEPS), rel=0.05), "another plan is measured again"


def test_evaluations_are_assumed_until_they_are_measured() -> None:
    eta = steps(Eta(1000), 1, 99)
    alone, assumed = left(eta).expected, left(eta, EVALUATIONS).expected
    assert assumed - alone == pytest.approx(10 * 8.0, rel=0.05)
    eta.plan("evaluate", 20.0)
    eta.plan("evaluate", 22.0)
    assert left(eta, EVALUATIONS).expected - alone == pytest.approx(10 * 21.0, rel=0.05)


def test_faults_to_come_cost_what_those_so_far_did() -> None:
    eta = steps(Eta(7200), 1, 3600)
    alone = left(eta)
    for _ in range(3):
        eta.fault(3600, 200.0)
    assert 3 * 100 < left(eta).expected - alone.expected < 5 * 200
    assert left(eta).worst - left(eta).expected > alone.worst - alone.expected
    again = steps(Eta(1000), 1, 500)
    again.fault(400, 30.0)
    assert left(again).expected > 600, "steps to be made again are left again"


def test_nothing_is_known_before_the_first_step_and_nothing_is_left_at_the_end_but_the_last_plans() -> None:
    eta = steps(Eta(100), 1, 100)
    assert left(eta) == TimeLeft(0.0, 0.0, 0.0)
    assert left(eta, EVALUATIONS).expected == pytest.approx(8.0, rel=0.05)
    eta = Eta(100)
    assert eta.left(EVALUATIONS) is None
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        eta.step(1, seconds)
    assert eta.left(EVALUATIONS) is None


def test_what_was_measured_is_kept_over_a_restart() -> None:
    run = simulated(1)
    half = run.at(0.5)
    eta = fed(Eta(run.steps), run, 0, half)
    again = Eta(run.steps, msgspec.json.decode(msgspec.json.encode(eta.facts), type=EtaFacts))
    assert again.facts == eta.facts
    newest = [one for one in run.happenings[:half] if one.kind == "train"][-500:]
    again.replay((one.step, one.seconds) for one in newest)
    assert again.facts == eta.facts
    assert left(again, run.schedules).expected == pytest.approx(left(eta, run.schedules).expected, rel=0.02)


@given(st.integers(0, 50), st.booleans(), st.integers(1, 300), st.data())
def test_a_schedule_counts_what_the_conductor_would_make(every: int, at_end: bool, steps: int, data: Any) -> None:
    step = data.draw(st.integers(0, steps))
    due = [at for at in range(step + 1, steps) if every and at % every == 0]
    assert Schedule(every, at_end).left(step, steps) == len(due) + at_end


@given(st.lists(st.floats(1e-4, 1e4), min_size=1, max_size=60), st.integers(0, 100))
def test_best_is_never_after_worst(seconds: list[float], more: int) -> None:
    eta = Eta(len(seconds) + more)
    for step, each in enumerate(seconds, 1):
        eta.step(step, each)
    time_left = eta.left(EVALUATIONS)
    assert time_left is None or 0 <= time_left.best <= time_left.expected <= time_left.worst < float("inf")


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
