"""Policies of the loss curve: curves with planted faults in, what they would do out; healthy curves are left alone."""

import math
import random
from collections.abc import Iterable
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.autopilot.policies import REGISTRY
from trainctl.node_agent.autopilot.policy import Memory, Proposal, RunFacts, Stepped
from trainctl.node_agent.planning import plans
from trainctl.protocol.analysis.curve import CurveJudge, CurveLimits
from trainctl.protocol.config.policies import PolicyName
from trainctl.protocol.messages import Finding, verbs

Found = list[tuple[int, Proposal | Finding]]


def proposals(
    name: PolicyName, losses: Iterable[float], checkpoints: tuple[int, ...] = (), memory: Memory | None = None,
    **settings: Any,
) -> Found:  # fmt: skip
    """Steps at which it says something; what it proposes is taken as sent."""
    found: Found = []
    run, memory = config(100_000, 12, policy={name: settings}), memory or Memory()
    kept = msgspec.structs.replace(durable(("a", "b"), 12), checkpoints=checkpoints)
    curve = CurveJudge(CurveLimits.of(run))
    for step, loss in enumerate(losses, 1):
        plan = plans.PlanMaker("sim", kept, run, step, 0).train()
        reports = {0: report(step=step, loss_sum=3 * loss, weight=3.0, own_weight=3.0, grad_norm=loss)}
        curve.add(step, loss, loss)
        said = REGISTRY[name].propose(RunFacts(run, kept, step, Stepped(plan, reports), curve), memory)
        if said is not None:
            found.append((step, said))
            memory.kept |= {**said.quiet, **said.remember} if isinstance(said, Proposal) else {}
    return found


def healthy(steps: int, seed: int) -> list[float]:
    """A loss that falls and scatters."""
    chance = random.Random(seed)
    return [2.0 + 2.0 * math.exp(-step / 200) + chance.gauss(0, 0.03) for step in range(steps)]


def with_level(losses: list[float], first: int, last: int, more: float) -> list[float]:
    return [loss + more if first <= step <= last else loss for step, loss in enumerate(losses, 1)]


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_curve_is_left_alone(seed: int) -> None:
    losses = healthy(1500, seed)
    assert not proposals("spike", losses, (100, 1000))
    assert not proposals("divergence", losses)


def test_a_spike_that_comes_back_is_left_alone() -> None:
    assert not proposals("spike", with_level(healthy(600, 1), 400, 430, 3.0), (100, 200, 300))


def test_a_spike_that_stays_takes_the_run_back_and_skips_to_beyond_its_beginning() -> None:
    losses = with_level(healthy(460, 1), 400, 460, 3.0)
    (first, *_) = proposals("spike", losses, (100, 200, 350))
    step, proposal = first
    assert isinstance(proposal, Proposal) and step == 450
    assert proposal.args == verbs.Rollback(step=350, skip_batches=200)
    assert proposal.reason.startswith("loss 5.") and proposal.reason.endswith("for 51 steps from 400")
    (first, *_) = proposals("spike", losses, (100,), skip_batches=300)
    assert isinstance(first[1], Proposal) and first[1].args == verbs.Rollback(step=100, skip_batches=303)


def test_it_goes_back_as_far_as_it_must_and_twice_a_run_at_most() -> None:
    losses, memory = with_level(healthy(460, 1), 400, 460, 3.0), Memory()
    (first, second) = proposals("spike", losses, (100, 350, 399), memory, min_back=52)
    assert isinstance(first[1], Proposal) and first[1].args == verbs.Rollback(step=350, skip_batches=200)
    assert memory.kept == {"times": 2.0} and isinstance(second[1], Proposal)
    memory.evidence.clear()
    assert not proposals("spike", losses, (100, 350), memory)


def test_a_checkpoint_further_back_than_the_batches_it_may_skip_is_not_gone_back_to() -> None:
    losses = with_level(healthy(460, 1), 400, 460, 3.0)
    ((_, said),) = proposals("spike", losses, (100,))
    assert isinstance(said, Finding)
    assert said.title.endswith(
        "but the newest checkpoint to go back to, of step 100, is more than 200 steps before it;"
        " write checkpoints more often: lower checkpoint.every_steps"
    )
    (first, *_) = proposals("spike", losses, (100,), skip_batches=0)
    assert isinstance(first[1], Proposal) and first[1].args == verbs.Rollback(step=100), "nothing is skipped"
    (first, *_) = proposals("spike", losses, (100,), min_back=300)
    assert isinstance(first[1], Proposal), "as far as was wanted"


def test_a_loss_that_keeps_rising_halves_the_rate_and_no_sooner_than_500_steps_later_again() -> None:
    losses = [loss + max(0.0, step - 400) * 0.004 for step, loss in enumerate(healthy(1500, 2))]
    (first, second, *_) = proposals("divergence", losses)
    assert isinstance(first[1], Proposal) and first[1].args == verbs.SetLr(value=5e-4)
    assert 450 < first[0] < 700 and second[0] - first[0] == 500
    assert "and rising, 100 steps far above" in first[1].reason
