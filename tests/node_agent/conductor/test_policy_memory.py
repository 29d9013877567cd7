"""What a run keeps of its policies' proposals: what was advised, what a refused command leaves, and what was seen."""

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
from tests.node_agent.support.journaled import JournaledAgent
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import config, durable

from trainctl.node_agent.autopilot.policy import Stepped
from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.state import ConductorState, Progress
from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.loss_trends import LEVEL_STEPS
from trainctl.protocol.config.policies import PolicyName
from trainctl.protocol.messages import events as e


class Asked:
    """The policies of a run that isn't made: losses in, decisions out."""

    def __init__(self, checkpoints: tuple[int, ...] = (), **tables: Any) -> None:
        kept = msgspec.structs.replace(durable(("a", "b"), 12), checkpoints=checkpoints)
        self.state = ConductorState("sim", config(10_000, 12, **tables), kept, Progress())
        self.proposals, self.rows = Proposals(self.state), list[m.StepCommitted]()

    def step(self, loss: float) -> list[d.Decision]:
        """What is decided at a step with this loss; the gradient norm is the same."""
        state = self.state
        plan = plans.PlanMaker("sim", state.durable, state.config, state.progress.step + 1, 0).train()
        own = report(step=plan.step, loss_sum=3 * loss, weight=3.0, own_weight=3.0, grad_norm=loss)
        self.rows.append(state.progress.commit(plan, own))
        self.proposals.ask(Stepped(plan, {0: own}))
        return state.take()

    def kept(self, name: PolicyName) -> PolicyState:
        return self.state.durable.policies[name]

    def advised(self, name: PolicyName, losses: Iterable[float]) -> list[int]:
        """The steps at which a policy advises something."""
        found = []
        for loss in losses:
            events = [made.data for made in self.step(loss) if isinstance(made, d.Happened)]
            if any(isinstance(data, e.PolicyAdvised) and data.name == name for data in events):
                found.append(self.state.progress.step)
        return found


def diverging(steps: int) -> list[float]:
    """A loss that falls for 800 steps, and rises from there on."""
    chance = random.Random(1)
    levels = (3 - step / 500 if step < 800 else 1.4 + (step - 800) / 200 for step in range(1, steps + 1))
    return [level + chance.gauss(0, 0.03) for level in levels]


def test_a_diverging_run_is_advised_once_in_a_quiet_period_though_the_rate_changes_with_every_step() -> None:
    asked = Asked(optimizer={"learning_rate": 1e-3, "schedule": "cosine"})
    first, second = asked.advised("divergence", diverging(1500))
    assert second - first == 500


def test_who_turns_it_on_after_its_advice_does_not_wait() -> None:
    asked, losses = Asked(), diverging(1500)
    (at,) = asked.advised("divergence", losses[:1000])
    asked.state.keep(policies={"divergence": msgspec.structs.replace(asked.kept("divergence"), mode="on")})
    assert at < 1000
    assert [made.verb for made in asked.step(losses[1000]) if isinstance(made, d.Proposed)] == ["set-lr"]


SPIKES = {"policy": {"spike": {"mode": "on"}}}


def spiking(asked: Asked, steps: int) -> Iterable[d.Proposed]:
    """What is proposed at a level that jumps and stays."""
    chance = random.Random(1)
    for step in range(asked.state.progress.step + 1, steps + 1):
        made = asked.step(2 + 3 * (step >= 400) + chance.gauss(0, 0.03))
        yield from (each for each in made if isinstance(each, d.Proposed))


def test_a_refused_command_costs_no_quota_and_an_applied_one_does() -> None:
    asked = Asked((300, 380), **SPIKES)
    times = []
    for proposed in spiking(asked, 470):
        if len(times) < 2:
            asked.state.end(proposed.id, "rejected", reason="the plan has changed", field="if_plan")
        else:
            asked.state.end(proposed.id, "applied", asked.state.progress.step)
        asked.proposals.note_ends()
        asked.state.take()
        times.append(asked.state.durable.policies["spike"].memory.get("times", 0.0))
    assert times == [0.0, 0.0, 1.0, 2.0]
    assert asked.state.durable.policies["spike"].pending == {}


def test_a_spike_in_progress_when_a_group_forms_anew_is_still_found() -> None:
    asked = Asked((300,), **SPIKES)
    assert not [*spiking(asked, 420)]
    asked.state.keep(generation=asked.state.durable.generation.next())
    made = next(iter(spiking(asked, 460)))
    assert (made.verb, made.reason[-22:]) == ("rollback", " for 51 steps from 400")


def test_an_agent_that_was_killed_reads_the_curve_from_the_record(tmp_path: Path) -> None:
    agent = JournaledAgent(tmp_path, 2, seed=1)
    try:
        agent.until(lambda: agent.step() >= LEVEL_STEPS)
        agent.kill()
        detector = agent.session.conductor.proposals.curve.divergences
        assert detector.best is not None and detector.best.step >= LEVEL_STEPS
    finally:
        agent.close()
