"""Policies on a run: what they see and propose, what is kept of that, and that together nothing goes to and fro."""

import random
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.node_agent.support.journaled import JournaledAgent
from tests.node_agent.support.policy_facts import full
from tests.node_agent.support.records import report
from tests.node_agent.support.simulation import Simulation, config, durable
from tests.tiers import scale

from trainctl.node_agent.autopilot.policy import Stepped
from trainctl.node_agent.conductor import events as d
from trainctl.node_agent.conductor.proposals import Proposals
from trainctl.node_agent.conductor.state import ConductorState, Progress
from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.durable import PolicyState
from trainctl.node_agent.simulate.models import DeviceModel, DeviceSpec
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.detectors import LEVEL_STEPS
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.config.cluster_file import SimulatedNode
from trainctl.protocol.config.policies import POLICIES, PolicyName
from trainctl.protocol.messages import events as e


class Asked:
    """The policies of a run that isn't made: losses in, decisions out."""

    def __init__(self, checkpoints: tuple[int, ...] = (), **tables: Any) -> None:
        kept = msgspec.structs.replace(durable(("a", "b"), 12), checkpoints=checkpoints)
        self.state = ConductorState("sim", config(10_000, 12, **tables), kept, Progress())
        self.proposals, self.rows = Proposals(self.state), list[m.StepCommitted]()

    def step(self, loss: float) -> list[d.Decision]:
        """Return what is decided at a step with this loss; the gradient norm is the same."""
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
    """Return what is proposed at a level that jumps and stays."""
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


SEEDS = scale("policy runs")
NOISE = 0.05
BATCH, NODES = 96, ("a", "b", "c")
SETTLED, STABLE, RETURN_STEPS = 200, 1000, 200
"""Steps in which policies may find their settings, steps that count, and steps within which none may come back."""
CAP = 10e9


def measured(seed: int, device: DeviceModel, work: m.RankWork, step: int) -> dict:
    """Return what a rank reports of a step: seconds with noise, memory by its micro-batch, and the loss of all."""
    of_all = random.Random(f"{seed} {step}")
    part = device.part(step, sum(piece.count for piece in work.ranges), work.micro_batch, 0.0)
    return {
        "phases": m.Phases(forward=part.forward, backward=part.backward, sync=0.02, optimizer=0.01),
        "loss_sum": 2.0 + 2.0 * 0.99**step + of_all.gauss(0, 0.03), "grad_norm": 1.0 + of_all.gauss(0, 0.03),
        "values": {"memory_peak_bytes": part.peak_bytes, "memory_cap_bytes": CAP, "clip_scale": 0.8},
    }  # fmt: skip


def device(seed: int, node: str, speed: float, fixed: float) -> DeviceModel:
    """With noise; it holds a part of its memory at any micro-batch."""
    memory = MemoryModel(fixed * CAP, 0.03 * CAP)
    spec = DeviceSpec("simulated device", PassCurve.line(0.0, 1 / speed), 0.01, memory, CAP, None)
    return DeviceModel(spec, SimulatedNode(samples_per_second=speed, noise=NOISE), seed, node)


def run(seed: int) -> Simulation:
    chance = random.Random(seed)
    policy: dict = {name: {"mode": "on"} for name in POLICIES}
    policy["early-stop"]["patience"] = 1000  # the run is to last
    tables = {"policy": policy, "evaluate": {"every_steps": 50}}
    made = Simulation(config(SETTLED + STABLE + 10, BATCH, **tables), durable(NODES, BATCH), seed)
    for rank in made.ranks.values():
        speed, fixed = chance.uniform(10.0, 100.0), chance.uniform(0.4, 0.8)
        rank.measures = partial(measured, seed, device(seed, NODES[rank.rank], speed, fixed))
    return made.begin()


def knobs(simulation: Simulation) -> dict[str, object]:
    """The settings that policies change, by name."""
    ranks = simulation.conductor.durable.settings.ranks
    found: dict[str, object] = {"shares": tuple(of.share for of in ranks.values())}
    found |= {f"micro-batch of {of.node}": of.micro_batch for of in ranks.values()}
    return found | {f"{of.node} takes part": not of.out for of in ranks.values()}


def test_nothing_goes_to_and_fro_and_a_stable_run_is_left_alone() -> None:
    counts, changes = list[int](), 0
    for seed in range(SEEDS):
        simulation, history = run(seed), defaultdict[str, list[tuple[int, object]]](list)
        for step in range(1, SETTLED + STABLE + 1):
            simulation.until_step(step)
            for name, value in knobs(simulation).items():
                if not history[name] or history[name][-1][1] != value:
                    history[name].append((step, value))
        for name, values in history.items():
            for (_, first), (left, _), (back, third) in zip(values, values[1:], values[2:], strict=False):
                assert first != third or back - left > RETURN_STEPS, (seed, name, values)
        actions = {
            step for values in history.values() for step, _ in values[1:] if SETTLED < step <= SETTLED + STABLE
        }  # fmt: skip
        counts.append(len(actions))
        changes += sum(len(values) - 1 for values in history.values())
    several = sum(count > 1 for count in counts)
    print(
        f"{changes} changes in {SEEDS} runs, {sum(counts)} of them in {STABLE} stable steps; {several} runs had several"
    )
    assert sum(counts) <= SEEDS, "more than one action in a run's stable steps, in the mean"
    assert changes >= SEEDS, "the policies did nothing that could go to and fro"
