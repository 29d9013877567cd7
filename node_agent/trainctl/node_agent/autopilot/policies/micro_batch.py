"""Keeps each rank's peak memory below a part of its cap, by the micro-batch; the loss doesn't change.

The mean over a window decides, so one high step shrinks nothing. A size that ran out of memory is barred for some
steps.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterator

from trainctl.node_agent.autopilot import bars
from trainctl.node_agent.autopilot.policy import (
    Memory,
    MemoryDeath,
    Policy,
    Proposal,
    Replayed,
    RunFacts,
    Stepped,
    percent,
    resize,
)
from trainctl.protocol import messages as m
from trainctl.protocol.config.policies import MicroBatchTable

PREDICTED = 0.85
"""Part of the cap that a larger micro-batch may be predicted to take. Peaks are predicted in proportion to the size:
too high, since weights and optimizer state don't grow with it."""

HELPED = 0.98
"""Part of the peak before to which a smaller micro-batch must have brought it, for another one to be tried."""


class MicroBatch(Policy):
    """Node by node: its ranks have one micro-batch, which the rank nearest to its cap decides."""

    name = "micro-batch"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        match facts.occasion:
            case Replayed(plan, report):
                _bar(facts, memory, report.rank, _sizes(plan)[report.rank], plan.step)
            case MemoryDeath(rank, _, size):
                _bar(facts, memory, rank, size, facts.step + 1)
            case Stepped():
                bars.go_back(memory.kept, facts.step, _table(facts).barred_steps)
                is_high, table = _observe(facts, memory, facts.occasion), _table(facts)
                may_grow = facts.step % table.window == 0 and (table.up == "on" or memory.kept)
                if is_high or may_grow:
                    return next(_changes(facts, memory), None)
        return None


def _sizes(plan: m.StepPlan) -> dict[int, int]:
    """The micro-batch of each rank."""
    return {work.rank: work.micro_batch for work in plan.work}


def _bar(facts: RunFacts, memory: Memory, rank: int, size: int, step: int) -> None:
    """A rank ran out of memory with micro-batches of this size. Its peaks before `step` count no more."""
    memory.kept |= bars.barred(rank, size, facts.step + _table(facts).barred_steps)
    memory.evidence.setdefault("since", {})[rank] = step


def _table(facts: RunFacts) -> MicroBatchTable:
    return facts.config.policy.micro_batch


def _observe(facts: RunFacts, memory: Memory, stepped: Stepped) -> bool:
    """Keep the newest steps. Whether a rank's peak is above the target: then the means are looked at, and else once in
    a window."""
    target, window = _table(facts).target, _table(facts).window
    steps: deque[Stepped] = memory.evidence.setdefault("steps", deque(maxlen=window))
    steps.append(stepped)
    return any((m.of_cap(report.values, "peak") or 0.0) > target for report in stepped.reports.values())


def _changes(facts: RunFacts, memory: Memory) -> Iterator[Proposal]:
    """What each node should change: first what takes less memory."""
    settings, nodes = facts.durable.settings, dict[str, list[int]]()
    for rank, setting in settings.live.items():
        nodes.setdefault(setting.node, []).append(rank)
    peaks = _uses(facts, memory)
    uses = {node: {rank: peaks[rank] for rank in ranks if rank in peaks} for node, ranks in nodes.items()}
    known = {node: found for node, found in uses.items() if len(found) == len(nodes[node])}
    for node, found in sorted(known.items(), key=lambda each: -max(each[1].values())):
        fullest = max(found, key=lambda rank: found[rank])
        size, use = settings.ranks[fullest].micro_in_force, found[fullest]
        if use > _table(facts).target:
            yield from _smaller(facts, memory, node, nodes[node], size, use)
        elif use < _table(facts).low:
            least = min(settings.ranks[rank].micro_in_force for rank in nodes[node])
            yield from _larger(facts, memory, node, nodes[node], least, use)


def _uses(facts: RunFacts, memory: Memory) -> dict[int, float]:
    """The part of its cap that each rank's peaks took, the mean over a whole window of steps with the newest size:
    peaks of another size say nothing of this one."""
    steps: deque[Stepped] = memory.evidence["steps"]
    since, newest, uses = memory.evidence.get("since", {}), _sizes(steps[-1].plan), dict[int, list[float]]()
    for step in steps:
        sizes = _sizes(step.plan)
        for rank, report in step.reports.items():
            use = m.of_cap(report.values, "peak")
            if use is not None and sizes[rank] == newest.get(rank) and step.plan.step >= since.get(rank, 0):
                uses.setdefault(rank, []).append(use)
    return {rank: statistics.fmean(found) for rank, found in uses.items() if len(found) == _table(facts).window}


def _smaller(facts: RunFacts, memory: Memory, node: str, ranks: list[int], size: int, use: float) -> Iterator[Proposal]:
    """Not again if the last time it hardly helped: then weights or other memory fill the device. None that is larger
    than a share of the node, which has one micro-batch for all its ranks."""
    table, kept = _table(facts), memory.kept
    has_helped = kept.get(f"shrunk {node}") != size or use <= HELPED * kept[f"use {node}"]
    wanted = max(table.least, min(size - 1, int(size * table.shrink)))
    least_share = min(facts.durable.settings.ranks[rank].share for rank in ranks)
    if wanted < size and has_helped and wanted <= least_share:
        made = _resized(facts, node, wanted, f"target {percent(table.target)}", use, "warning")
        yield dataclasses.replace(made, remember={f"shrunk {node}": float(wanted), f"use {node}": use})


def _larger(facts: RunFacts, memory: Memory, node: str, ranks: list[int], size: int, use: float) -> Iterator[Proposal]:
    """Advised only where it had been larger: that a size which never was tried is faster isn't known."""
    table, settings, kept = _table(facts), facts.durable.settings, memory.kept
    was_larger = f"shrunk {node}" in kept or any(bars.was_barred(kept, rank) for rank in ranks)
    if table.up == "off" or (table.up == "advise" and not was_larger):
        return
    wanted = max(size + 1, int(size * table.grow))
    bounds = [settings.ranks[rank].share for rank in ranks]
    bounds += [table.most] if table.most else []
    bounds += [bar - 1 for rank in ranks if (bar := bars.size(kept, rank, facts.step))]
    wanted = min(wanted, *bounds)
    if wanted > size and use * wanted / size <= PREDICTED:
        made = _resized(facts, node, wanted, f"it may grow below {percent(table.low)}", use, "info")
        yield dataclasses.replace(made, advise_only=table.up == "advise")


def _resized(facts: RunFacts, node: str, size: int, why: str, use: float, severity: m.Severity) -> Proposal:
    reason = f"mean peak memory over {_table(facts).window} steps: {percent(use)} of the cap; {why}"
    return resize(size, node, reason, severity)


POLICY = MicroBatch()
