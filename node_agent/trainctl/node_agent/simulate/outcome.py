"""What a simulation came to, in figures: speed, efficiency, faults, commands of policies and cost."""

import statistics
from typing import Any

from trainctl.node_agent.planning.durable import RankSetting
from trainctl.node_agent.simulate.scenario import Scenario
from trainctl.node_agent.simulate.simulation import SimulatedRun
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader

NEWEST_STEPS = 500
"""Newest steps whose median is given, so that the first ones, before shares have settled, don't count."""


def outcome(scenario: Scenario, played: SimulatedRun, paths: RunPaths) -> dict[str, Any]:
    """As one JSON object. Seconds are simulated ones, but for `real_seconds`."""
    conductor, cost = played.lead.conductor, played.lead.view().cost
    with RecordReader(paths) as reader:
        last, totals = reader.last_step(), reader.totals()
        steps = reader.steps(max(last.step - NEWEST_STEPS, 0), NEWEST_STEPS)[0] if last is not None else ()
    median = statistics.median([step.step_seconds for step in steps]) if steps else None
    batch, samples = conductor.durable.settings.global_batch, sum(step.samples for step in steps)
    rate = samples / sum(step.step_seconds for step in steps) if steps else None
    settings = conductor.durable.settings
    alone = {
        scenario_node(scenario, rank): rate_alone(scenario, rank, settings.ranks[rank]) for rank in scenario.devices
    }
    return {
        "simulated": True, "run": paths.directory.name, "run_directory": str(paths.directory),
        "state": played.ended.state, "reason": played.ended.reason, "seed": scenario.seed,
        "steps": conductor.progress.step, "global_batch": batch, "seconds": played.simulated_seconds,
        "real_seconds": round(played.real_seconds, 3), "step_seconds": median, "samples_per_second": rate,
        "tokens_per_second": rate * scenario.config.data.sequence_length if rate is not None else None,
        "alone_samples_per_second": alone, "efficiency": rate / sum(alone.values()) if rate is not None else None,
        "sum_seconds": scenario.links.sum_seconds([*settings.live]), "time_in_steps": totals.step_seconds,
        "deaths": played.deaths, "generations": conductor.durable.generation.n, "returns": played.returns,
        "actions": {name.removeprefix("auto:"): count for name, count in sorted(played.lead.actions.items())},
        "shares": {setting.node: setting.share for setting in settings.ranks.values()},
        "micro_batches": {setting.node: setting.micro_in_force for setting in settings.ranks.values()},
        "cost": cost.spent if cost is not None else None, "currency": cost.currency if cost is not None else None,
        "loss": last.loss if last is not None else None,
    }  # fmt: skip


def scenario_node(scenario: Scenario, rank: int) -> str:
    """Its name."""
    return [*scenario.config.nodes][rank]


def rate_alone(scenario: Scenario, rank: int, setting: RankSetting) -> float:
    """Return the samples per second of one rank without a group, with the faster of the micro-batches that it ended
    with and that its share left of it: what the group has, the rank alone could have too."""
    device, batch = scenario.devices[rank], scenario.config.batch.global_
    rates = []
    for micro in {setting.micro_batch, setting.micro_in_force}:
        while micro > 1 and device.out_of_memory(micro):
            micro = (micro + 1) // 2
        rates.append(batch / (device.curve.share_seconds(batch, min(micro, batch)) + device.step_seconds))
    return max(rates)
