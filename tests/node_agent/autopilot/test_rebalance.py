"""The policy that moves samples to fast ranks, over simulated steps with noise."""

import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable
from tests.tiers import scale

from trainctl.node_agent.autopilot.policies.rebalance import Rebalance
from trainctl.node_agent.autopilot.policy import Memory, Proposal, RunFacts, Stepped, bar_size
from trainctl.node_agent.planning import plans, share_edits
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.node_agent.planning.rank_models import Rates
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs

SEEDS = scale("rebalanced runs")
NODES = ("a", "b", "c", "d")
BATCH = 96
FLOOR = 0.02
"""Seconds of each step, whatever the share."""

Rate = Callable[[int, int], float]
"""Samples per second, by rank and step."""


class Run:
    """Ranks of these speeds, and what the policy does about them. A command takes effect two steps later."""

    def __init__(self, rate: Rate, noise: float = 0.0, seed: int = 0, **settings: Any) -> None:
        self.rate, self.noise, self.chance = rate, noise, random.Random(seed)
        self.config = config(100_000, BATCH, policy={"rebalance": settings}) if settings else config(100_000, BATCH)
        self.durable, self.memory, self.rates = durable(NODES, BATCH), Memory(), Rates()
        self.step, self.sent = 0, list[tuple[int, Proposal]]()
        self._due: tuple[int, Proposal] | None = None

    @property
    def shares(self) -> dict[int, int]:
        return {rank: setting.share for rank, setting in self.durable.settings.live.items()}

    def seconds(self) -> float:
        """Return the seconds of a step without noise."""
        return max(share / self.rate(rank, self.step) for rank, share in self.shares.items()) + FLOOR

    def best_seconds(self) -> float:
        """Return the seconds of a step without noise that could be divided at will."""
        return BATCH / sum(self.rate(rank, self.step) for rank in self.shares) + FLOOR

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            self._take_effect()
            self._one()
        return self

    def _take_effect(self) -> None:
        if self._due is None or self._due[0] > self.step:
            return
        args, made = self._due[1].args, self._due[1].edit
        assert isinstance(args, verbs.Rebalance)
        facts = share_edits.Facts(models=self.rates.of(self.shares))
        made = made or share_edits.rebalance(self.durable.settings, args, facts)
        self.durable, self._due = msgspec.structs.replace(self.durable, settings=made.settings), None

    def _one(self) -> None:
        self.step += 1
        busy = {
            rank: share / self.rate(rank, self.step) * self.chance.lognormvariate(0, self.noise)
            for rank, share in self.shares.items()
        }
        reports = {
            rank: self._report(rank, share, busy[rank], max(busy.values())) for rank, share in self.shares.items()
        }
        self.rates.reported(reports, self.durable.settings.plan_version)
        plan = plans.PlanMaker("sim", self.durable, self.config, self.step, 0).train()
        occasion = Stepped(plan, reports, partial(self.rates.of, reports))
        made = Rebalance().propose(RunFacts(self.config, self.durable, self.step, occasion), self.memory)
        if made is not None and self._due is None:
            self.memory.kept |= made.remember
            self.sent.append((self.step, made))
            self._due = self.step + 1, made

    def _report(self, rank: int, share: int, busy: float, slowest: float) -> m.Report:
        return report(
            rank, self.step, own_samples=share, micro_batch=self.durable.settings.ranks[rank].micro_in_force,
            phases=m.Phases(forward=busy, optimizer=FLOOR), step_seconds=slowest + FLOOR,
        )  # fmt: skip


def steady(*rates: float) -> Rate:
    return lambda rank, step: rates[rank]


def changing(first: Mapping[int, float], then: Mapping[int, float], at: int) -> Rate:
    return lambda rank, step: (first if step < at else then)[rank]


UNEQUAL = dict(enumerate((50.0, 25.0, 10.0, 40.0)))
FAST = {1: 60.0, 2: 60.0, 3: 60.0}


def test_an_even_start_is_put_right_within_ten_steps() -> None:
    run = Run(steady(*UNEQUAL.values()), noise=0.02).steps(10)
    assert run.best_seconds() / run.seconds() > 0.95
    (sent,) = run.sent
    assert sent[1].args == verbs.Rebalance(auto=True)
    assert sent[1].reason.startswith("a step takes 2.4")


def test_a_rank_that_turns_slow_is_followed_within_ten_steps() -> None:
    slower = {**UNEQUAL, 0: 25.0}
    run = Run(changing(UNEQUAL, slower, at=60), noise=0.02).steps(70)
    assert run.best_seconds() / run.seconds() > 0.95
    assert len(run.sent) == 2


def test_a_small_gain_is_taken_only_if_it_lasts() -> None:
    run = Run(steady(25.0, 25.0, 25.0, 22.5)).steps(23)
    assert run.sent == [], "two windows aren't enough"
    assert [at for at, _ in run.steps(20).sent] == [24]


def spoiled_by_more(run: Run, slow: float) -> Rate:
    """Rank 0 loses speed as soon as it has more than at first, which no measurement could tell before."""
    before = run.shares[0]
    return lambda rank, step: slow if rank == 0 and run.shares[0] > before else UNEQUAL[rank]


def given(shares: Sequence[int], nodes: Sequence[str] = NODES) -> Run:
    """A run with other shares than even ones."""
    run = Run(steady(*UNEQUAL.values()))
    ranks = {
        rank: msgspec.structs.replace(of, node=nodes[rank], share=shares[rank])
        for rank, of in run.durable.settings.ranks.items()
    }
    settings = msgspec.structs.replace(run.durable.settings, ranks=ranks)
    run.durable = msgspec.structs.replace(run.durable, settings=settings)
    return run


def test_a_split_that_disappoints_is_undone_if_none_is_much_better() -> None:
    run = given([32, 21, 8, 35])
    run.rate, before = spoiled_by_more(run, 38.0), run.shares
    first, second = run.steps(30).sent[:2]
    assert first[1].args == verbs.Rebalance(auto=True)
    assert second[1].args == verbs.Rebalance(shares=dict(zip(NODES, before.values(), strict=True)))
    assert "where" in second[1].reason and second[1].severity == "warning"
    assert run.shares == before
    later = [at for at, _ in run.steps(100).sent]
    assert later[2] - later[1] >= 40, "the quiet is twice as long"


def test_a_split_that_disappoints_by_far_is_corrected_at_once() -> None:
    run = Run(steady(*UNEQUAL.values()))
    even = run.seconds()
    run.rate = spoiled_by_more(run, 9.0)
    first, second, third = run.steps(60).sent[:3]
    assert second[1].args == verbs.Rebalance(auto=True)
    assert second[0] - first[0] < 10
    assert third[0] - second[0] >= 40, "the quiet is twice as long"
    assert Run.seconds(run) < even


def test_a_split_that_whole_samples_made_the_best_is_left_once_the_ranks_change() -> None:
    run = given([1, 32, 32, 31])
    run.rate = changing({0: 1.0, **FAST}, {0: 15.0, **FAST}, at=100)
    assert not run.steps(99).sent
    assert run.best_seconds() / run.seconds() < 0.6
    run.steps(101)
    assert run.best_seconds() / run.seconds() > 0.95


@pytest.mark.parametrize(("micro_batch", "until", "waits"), [(64, 30, True), (64, 1000, True), (16, 30, False)])
def test_a_share_brings_no_rank_a_micro_batch_that_ran_out_of_memory(micro_batch: int, until: int, waits: bool) -> None:
    """An even share is 24 samples; the fast rank's would be 38."""
    run = Run(steady(*UNEQUAL.values()))
    ranks = {
        rank: msgspec.structs.replace(of, micro_batch=micro_batch) for rank, of in run.durable.settings.ranks.items()
    }
    settings = msgspec.structs.replace(run.durable.settings, ranks=ranks)
    kept = {"micro-batch": PolicyState(memory=bar_size(0, 30, until))}
    run.durable = msgspec.structs.replace(run.durable, settings=settings, policies=kept)
    sent = [at for at, _ in run.steps(40).sent]
    assert bool(sent) == (not waits or until < 40)
    assert not waits or all(at >= until for at in sent)


def test_a_run_that_has_gone_back_isnt_quiet_for_thousands_of_steps() -> None:
    run = Run(steady(*UNEQUAL.values()))
    run.step, run.memory.kept = 10_000, {
        "quiet until": 30_020.0, "quiet": 20.0, "promised": 0.5, "version": 0.0, "corrections": 1.0,
    }  # fmt: skip
    assert [at for at, _ in run.steps(40).sent] == [10_024]
    assert run.memory.kept["quiet until"] == 10_044


@pytest.mark.parametrize("are_alike", [True, False])
def test_noise_alone_rarely_moves_anything_and_never_back_and_forth(are_alike: bool) -> None:
    """At most one action in 1,000 steps beside the one that an even start of unlike ranks needs, and no split comes
    back within 200 steps."""
    actions, returns = 0, 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        rates = (25.0,) * 4 if are_alike else [10 ** chance.uniform(0.8, 2) for _ in NODES]
        run = Run(steady(*rates), 0.05, seed)
        splits = [(0, run.shares)]
        for _ in range(1000):
            if run.steps(1).shares != splits[-1][1]:
                splits.append((run.step, run.shares))
        actions += len(run.sent) - (not are_alike)
        pairs = zip(splits, splits[2:], strict=False)
        returns += sum(one[1] == other[1] and other[0] - one[0] <= 200 for one, other in pairs)
    print(f"{actions} actions and {returns} returns in {SEEDS} runs of 1,000 steps")
    assert actions <= SEEDS
    assert returns == 0
