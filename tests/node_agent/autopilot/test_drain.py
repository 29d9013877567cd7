"""The policy that drains a node which costs more time than it gives, over simulated steps with noise."""

import random
from functools import partial
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.autopilot.policies.drain import Drain
from trainctl.node_agent.autopilot.policy import Memory, Proposal, RunFacts, Stepped
from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.rank_models import Rates
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs

BATCH, FLOOR = 96, 0.02
HOPELESS = (50.0, 40.0, 0.4)
"""Samples per second: the last rank takes 2.5 s for one, the others 1.1 s for all."""


class Run:
    """Three ranks with the best split there is, whose last has one sample."""

    def __init__(
        self, *rates: float, steps: int = 10_000, nodes: str = "abc", noise: float = 0.02, **settings: Any
    ) -> None:
        self.rates, self.noise, self.chance = [*rates], noise, random.Random(1)
        self.config = config(steps, BATCH, policy={"drain": settings})
        self.durable, self.memory, self.measured, self.step = durable(tuple(nodes), BATCH), Memory(), Rates(), 0
        ranks = self.durable.settings.ranks
        ranks = {rank: msgspec.structs.replace(of, share=(53, 42, 1)[rank]) for rank, of in ranks.items()}
        self.durable = msgspec.structs.replace(self.durable, settings=self.durable.settings.edited(ranks=ranks))
        self.sent: list[tuple[int, Proposal]] = []

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            self.step += 1
            made = Drain().propose(self.facts(), self.memory)
            self.sent += [(self.step, made)] if made is not None else []
        return self

    def facts(self) -> RunFacts:
        live = self.durable.settings.live
        reports = {rank: self._report(rank, of.share) for rank, of in live.items()}
        self.measured.reported(reports, self.durable.settings.plan_version)
        plan = plans.PlanMaker("sim", self.durable, self.config, self.step, 0).train()
        return RunFacts(
            self.config, self.durable, self.step, Stepped(plan, reports, partial(self.measured.of, reports))
        )

    def _report(self, rank: int, share: int) -> m.Report:
        busy = share / self.rates[rank] * self.chance.lognormvariate(0, self.noise)
        phases = m.Phases(forward=busy, optimizer=FLOOR)
        return report(rank, self.step, own_samples=share, micro_batch=4, phases=phases)


def test_a_node_that_costs_more_than_it_gives_is_drained_after_a_hundred_steps() -> None:
    run = Run(*HOPELESS).steps(140)
    step, proposal = run.sent[0]
    assert step == 140
    assert (proposal.verb, proposal.args, proposal.node) == ("drain", verbs.Drain(), "c")
    assert proposal.reason.startswith("with the best split steps take 2.4") and "s without it" in proposal.reason


@pytest.mark.parametrize("rates", [(50.0, 40.0, 5.0), (50.0, 50.0, 50.0), (50.0, 40.0, 1.0)])
def test_a_slow_node_that_gives_more_than_it_costs_stays(rates: tuple[float, ...]) -> None:
    """At 1 sample per second it does one in less than the 1.1 s that the others take anyway."""
    assert not Run(*rates).steps(400).sent


def test_near_the_end_a_drain_is_not_worth_its_cost() -> None:
    assert not Run(*HOPELESS, steps=160).steps(159).sent
    assert Run(*HOPELESS, steps=160, move_seconds=1.0).steps(159).sent


def test_a_spell_of_slowness_starts_the_count_again() -> None:
    run = Run(*HOPELESS).steps(90)
    run.rates[2] = 50.0
    run.steps(20)
    run.rates[2] = 0.4
    assert not run.steps(90).sent
    assert run.steps(60).sent


def test_all_ranks_of_a_node_leave_together_and_the_last_node_stays() -> None:
    assert not Run(*HOPELESS, nodes="aaa").steps(200).sent
    (first, *_) = Run(*HOPELESS, nodes="abb").steps(200).sent  # a alone takes 1.9 s
    assert first[1].node == "b"
