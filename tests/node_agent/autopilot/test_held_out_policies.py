"""Policies of the held-out loss: evaluations in, cuts of the learning rate and the run's end out."""

from typing import Any

import pytest
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.autopilot.policies import REGISTRY
from trainctl.node_agent.autopilot.policy import HeldOutLoss, Memory, Proposal, RunFacts
from trainctl.protocol.config.policies import PolicyName
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import verbs
from trainctl.protocol.messages.events import LearningRateChanged

Losses = list[tuple[int, float]]


def made(name: PolicyName, **settings: Any) -> RunFile:
    evaluated = {"evaluate": {"every_steps": 10}, "data": {"path": "/data", "held_out": 0.1}}
    return config(100_000, 12, policy={name: {"mode": "on", **settings}}, **evaluated)


def proposals(name: PolicyName, losses: Losses, memory: Memory, **settings: Any) -> list[tuple[int, Proposal]]:
    """Steps at which it proposes something; each is taken as sent."""
    found = []
    for step, loss in losses:
        facts = RunFacts(made(name, **settings), durable(("a", "b"), 12), step, HeldOutLoss(step, loss))
        proposal = REGISTRY[name].propose(facts, memory)
        if isinstance(proposal, Proposal):
            found.append((step, proposal))
            memory.kept |= proposal.remember
    return found


def level(steps: range, loss: float = 2.0) -> Losses:
    return [(step, loss) for step in steps]


def test_five_evaluations_without_improvement_halve_the_rest_of_the_schedule() -> None:
    ((step, proposal),) = proposals("plateau", level(range(10, 120, 10)), Memory())
    assert step == 60 and proposal.edit is not None
    assert proposal.edit.settings.lr.number == 0.5
    assert proposal.edit.change == LearningRateChanged(1e-3, 5e-4, "scale")
    assert proposal.args == verbs.SetLr(value=5e-4)
    assert proposal.reason == "no improvement over 2 of step 10 in 5 evaluations"


def test_after_a_cut_two_evaluations_dont_count() -> None:
    assert [step for step, _ in proposals("plateau", level(range(10, 260, 10)), Memory())] == [60, 130, 200]


@pytest.mark.parametrize(("improvement", "cuts"), [(1e-3, 0), (5e-5, 1)])
def test_only_what_is_relatively_large_enough_is_an_improvement(improvement: float, cuts: int) -> None:
    falling = [(10 * number, 2.0 * (1 - improvement) ** number) for number in range(1, 8)]
    assert len(proposals("plateau", falling, Memory(), improvement=6e-4)) == cuts


def test_a_loss_that_is_not_finite_is_no_improvement() -> None:
    losses = [(10, 2.0), *level(range(20, 70, 10), float("nan"))]
    assert [step for step, _ in proposals("plateau", losses, Memory())] == [60]


def test_nothing_is_cut_below_the_least_rate() -> None:
    assert not proposals("plateau", level(range(10, 500, 10)), Memory(), min_rate=6e-4)


def test_an_early_stop_waits_for_its_patience() -> None:
    ((step, proposal), *_) = proposals("early-stop", level(range(10, 200, 10)), Memory(), patience=8)
    assert (step, proposal.verb, proposal.args) == (90, "stop", verbs.Stop())


def test_a_run_that_goes_back_has_counted_only_what_was_evaluated_by_then() -> None:
    losses, memory = level(range(10, 260, 10)), Memory()
    straight = proposals("plateau", losses, memory)
    for at in range(1, len(losses)):
        kept = REGISTRY["plateau"].gone_back(made("plateau"), memory.kept, losses[:at])
        again = proposals("plateau", losses[at:], Memory(dict(kept)))
        assert [step for step, _ in again] == [step for step, _ in straight if step > losses[at - 1][0]]


def test_who_resumes_a_run_that_was_stopped_gets_the_whole_patience_again() -> None:
    losses, memory = level(range(10, 130, 10)), Memory()
    assert proposals("early-stop", losses[:11], memory)[0][0] == 110
    resumed = Memory(dict(REGISTRY["early-stop"].gone_back(made("early-stop"), memory.kept, losses[:11])))
    assert next(step for step, _ in proposals("early-stop", level(range(120, 260, 10)), resumed)) == 210
