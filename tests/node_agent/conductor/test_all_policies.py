"""All policies on, over simulated ranks with noise: nothing goes to and fro, and a stable run is left alone."""

import random
from collections import defaultdict
from functools import partial

from tests.node_agent.support.simulation import Simulation, config, durable
from tests.tiers import scale

from trainctl.node_agent.simulate.models import DeviceModel, DeviceSpec
from trainctl.protocol import messages as m
from trainctl.protocol.batch.memory_estimate import MemoryModel
from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.config.cluster_file import SimulatedNode
from trainctl.protocol.config.policies import POLICIES

SEEDS = scale("policy runs")
NOISE = 0.05
BATCH, NODES = 96, ("a", "b", "c")
SETTLED, STABLE, RETURN_STEPS = 200, 1000, 200
"""Steps in which policies may find their settings, steps that count, and steps within which none may come back."""
CAP = 10e9


def measured(seed: int, device: DeviceModel, work: m.RankWork, step: int) -> dict:
    """What a rank reports of a step: seconds with noise, memory by its micro-batch, and the loss of all."""
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
