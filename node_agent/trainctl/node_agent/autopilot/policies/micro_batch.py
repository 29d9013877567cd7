"""Keeps each rank's peak memory below a part of its cap, and its micro-batch from being past the peak of its curve;
the loss doesn't change.

The mean over a window decides, so one high step shrinks nothing. A size that ran out of memory is barred for some
steps. Where the run file says "auto" and a node has no profile, its first steps look for its fastest micro-batch: each
of a few steps twice as large, as long as that is faster and memory allows it. After a lack of memory it is smaller,
before the rank comes back or for the steps that follow.
"""

import dataclasses
import statistics
from collections import deque
from collections.abc import Iterator, Mapping

import msgspec

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    HeldOutLoss,
    Measured,
    Memory,
    MemoryDeath,
    Policy,
    Proposal,
    Replayed,
    RunFacts,
    Stepped,
    assess,
    bar_size,
    barred_size,
    mode_of,
    percent,
    resize,
    shorten_bars,
    was_barred,
)
from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.share_edits import Edit, resized
from trainctl.protocol.batch.pass_curve import CLEAR_GAIN, SMALL_GAIN
from trainctl.protocol.calibration.peak import MAX_CAP_PART
from trainctl.protocol.config.policies import MicroBatchTable
from trainctl.protocol.config.run_tables import UNMEASURED
from trainctl.protocol.messages import FindingSeverity, PolicyFigure, StepPlan, peak_of_cap
from trainctl.protocol.messages.events import MicroBatchChanged

HELPED = 0.98
"""Part of the peak before to which a smaller micro-batch must have brought it, for another one to be tried."""


RAMP_STEPS = 3
"""Steps with one micro-batch in a search, of which the first warms up and the fastest of the others counts."""


@dataclasses.dataclass(frozen=True)
class _Peaks:
    """Peaks of a rank's newest steps in a row, all with one micro-batch: those of another say nothing about it."""

    micro: int  # samples of a pass
    uses: deque[float]  # peaks as parts of the cap


class MicroBatch(Policy):
    """Node by node: its ranks have one micro-batch, which the rank nearest to its cap decides."""

    name = "micro-batch"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        match facts.occasion:
            case Replayed(plan, report):
                _bar(facts, memory, report.rank, _sizes(plan)[report.rank])
            case MemoryDeath(rank, _, size):
                _bar(facts, memory, rank, size)
            case Stepped() as stepped:
                shorten_bars(memory.kept, facts.step, _table(facts).barred_steps)
                for node, ranks in _searching(facts, memory, stepped):
                    found = _next_size(facts, memory, stepped, node, ranks)
                    if found is not None:
                        return found
                if _observe(facts, memory, stepped) or facts.step % _table(facts).window == 0:
                    return next(_changes(facts, memory, stepped), None)
            case Measured() | HeldOutLoss() | None:
                pass  # nothing of memory
        return None

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, ranks = _table(facts), facts.durable.settings.live
        uses = _uses(facts, memory).values()
        barred = sum(barred_size(memory.kept, rank, facts.step) is not None for rank in ranks)
        what = f"peak memory, mean of {table.window} steps"
        figures = [
            PolicyFigure(f"highest {what}", max(uses, default=None), table.target, "part"),
            PolicyFigure(f"lowest {what}", min(uses, default=None), table.low, "part", "below"),
            PolicyFigure("ranks with a size that ran out of memory", barred),
        ]
        otherwise = f"shrinks above {percent(table.target)} of the cap; may grow below {percent(table.low)}"
        wanted = _changes(facts, memory, facts.occasion) if isinstance(facts.occasion, Stepped) else iter(())
        return assess(figures, next(wanted, None), otherwise)


def _sizes(plan: StepPlan) -> dict[int, int]:
    return {work.rank: work.micro_batch for work in plan.work}


def _bar(facts: RunFacts, memory: Memory, rank: int, size: int) -> None:
    """A rank ran out of memory with micro-batches of this size. Its peaks before that count no more."""
    memory.kept |= bar_size(rank, size, facts.step + _table(facts).barred_steps)
    _peaks(memory).pop(rank, None)


def _table(facts: RunFacts) -> MicroBatchTable:
    return facts.config.policy.micro_batch


def _observe(facts: RunFacts, memory: Memory, stepped: Stepped) -> bool:
    """Keep the newest steps. Whether a rank's peak is above the target: then the means are looked at, and else once in
    a window."""
    table, peaks, reports, highest = _table(facts), _peaks(memory), stepped.reports, 0.0
    for work in stepped.plan.work:
        rank = work.rank
        use = peak_of_cap(reports[rank].values) if rank in reports else None
        if use is None:
            peaks.pop(rank, None)
            continue
        known = peaks.get(rank)
        if known is None or known.micro != work.micro_batch:
            known = peaks[rank] = _Peaks(work.micro_batch, deque(maxlen=table.window))
        known.uses.append(use)
        if use > highest:
            highest = use
    return highest > table.target


def _peaks(memory: Memory) -> dict[int, _Peaks]:
    found: dict[int, _Peaks] = memory.evidence.setdefault("peaks", {})
    return found


def _changes(facts: RunFacts, memory: Memory, stepped: Stepped) -> Iterator[Proposal]:
    """Yield what each node should change: first what takes less memory, then what is faster."""
    yield from _by_memory(facts, memory, stepped)
    nodes = _ranks_by_node(facts)
    for node, ranks in nodes.items():
        yield from _past_the_peak(facts, stepped, node, ranks)


def _ranks_by_node(facts: RunFacts) -> dict[str, list[int]]:
    nodes = dict[str, list[int]]()
    for rank, setting in facts.durable.settings.live.items():
        nodes.setdefault(setting.node, []).append(rank)
    return nodes


def _searching(facts: RunFacts, memory: Memory, stepped: Stepped) -> Iterator[tuple[str, list[int]]]:
    """Yield the nodes, with their ranks, whose fastest micro-batch is still looked for."""
    live = facts.durable.settings.live
    is_left_open = any(setting.auto_micro for setting in live.values())
    if not is_left_open or _table(facts).up == "off" or mode_of(facts.config, facts.durable, "micro-batch") != "on":
        return
    for node, ranks in _ranks_by_node(facts).items():
        if memory.kept.get(f"searched {node}") or any(
            not live[rank].auto_micro or live[rank].halved_to for rank in ranks
        ):
            continue
        if node in memory.evidence.get("search", {}) or not _has_curves(stepped, ranks):
            yield node, ranks


def _next_size(facts: RunFacts, memory: Memory, stepped: Stepped, node: str, ranks: list[int]) -> Proposal | None:
    """Return a node's next micro-batch, or back to the one before if that was faster; None while it is timed, and once
    the search is over."""
    search: dict[int, list[float]] = memory.evidence.setdefault("search", {}).setdefault(node, {})
    size = max(facts.durable.settings.ranks[rank].micro_in_force for rank in ranks)
    reports = [stepped.reports[rank] for rank in ranks if rank in stepped.reports]
    if len(reports) < len(ranks) or any(
        report.micro_batch != min(size, report.own_samples) or not report.own_samples for report in reports
    ):
        return None  # planned before the last change
    search.setdefault(size, []).append(
        max(report.phases.busy / (report.own_tokens or report.own_samples) for report in reports)
    )
    if len(search[size]) < RAMP_STEPS:
        return None
    seconds = {micro: min(times[1:]) for micro, times in search.items() if len(times) >= RAMP_STEPS}
    best = min(seconds, key=lambda micro: seconds[micro])
    uses = [use for report in reports if (use := peak_of_cap(report.values)) is not None]
    has_peaks = len(uses) == len(ranks)
    bound = _most(facts, memory, stepped, ranks, size, max(uses)) if has_peaks else max(size, UNMEASURED)
    larger = min(2 * size, bound, _largest_allowed(facts, memory, ranks))
    if size == best and larger > size and _is_faster(seconds, size):
        reason = f"the first steps look for the fastest micro-batch; {size} was the fastest so far"
        return _taken(facts, node, ranks, larger, reason)
    memory.kept[f"searched {node}"] = 1.0
    if best == size:
        return None
    reason = f"passes of {best} were {percent(seconds[size] / seconds[best] - 1)} faster than of {size}"
    return _taken(facts, node, ranks, best, reason)


def _is_faster(seconds: Mapping[int, float], size: int) -> bool:
    return all(before >= (1 + SMALL_GAIN) * seconds[size] for micro, before in seconds.items() if micro < size)


def _taken(facts: RunFacts, node: str, ranks: list[int], size: int, reason: str) -> Proposal:
    return resize(size, node, reason, edit=resized(facts.durable.settings, ranks, size))


def _past_the_peak(facts: RunFacts, stepped: Stepped, node: str, ranks: list[int]) -> Iterator[Proposal]:
    """Down to where a node's ranks are fastest, if their curves are known."""
    size = max(facts.durable.settings.ranks[rank].micro_in_force for rank in ranks)
    if not _has_curves(stepped, ranks):
        return
    wanted, faster = _fastest(facts, stepped, ranks, size, range(_table(facts).least, size), CLEAR_GAIN)
    if wanted < size:
        reason = f"passes of {wanted} are {percent(faster)} faster than of {size} by its curve"
        yield resize(wanted, node, reason)


def _by_memory(facts: RunFacts, memory: Memory, stepped: Stepped) -> Iterator[Proposal]:
    table, peaks = _table(facts), _uses(facts, memory)
    if all(table.low <= use <= table.target for use in peaks.values()):
        return
    settings, nodes = facts.durable.settings, _ranks_by_node(facts)
    uses = {node: {rank: peaks[rank] for rank in ranks if rank in peaks} for node, ranks in nodes.items()}
    known = {node: found for node, found in uses.items() if len(found) == len(nodes[node])}
    for node, found in sorted(known.items(), key=lambda each: -max(each[1].values())):
        fullest = max(found, key=lambda rank: found[rank])
        size, use = settings.ranks[fullest].micro_in_force, found[fullest]
        if use > table.target:
            yield from _smaller(facts, memory, node, nodes[node], size, use)
        elif use < table.low:
            yield from _larger(facts, memory, stepped, node, nodes[node], use)


def _uses(facts: RunFacts, memory: Memory) -> dict[int, float]:
    """The part of its cap that each rank's peaks took, the mean over a whole window of steps."""
    window = _table(facts).window
    return {rank: statistics.fmean(of.uses) for rank, of in _peaks(memory).items() if len(of.uses) == window}


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


def _larger(
    facts: RunFacts, memory: Memory, stepped: Stepped, node: str, ranks: list[int], use: float
) -> Iterator[Proposal]:
    """To where its ranks are fastest, if their curves are known. Else a step up, advised only where it had been
    larger: that a size which never was tried is faster isn't known."""
    table, kept = _table(facts), memory.kept
    if table.up == "off":
        return
    size = min(facts.durable.settings.ranks[rank].micro_in_force for rank in ranks)
    bound = _most(facts, memory, stepped, ranks, size, use)
    if _has_curves(stepped, ranks):
        wanted, faster = _fastest(facts, stepped, ranks, size, range(size, bound + 1), SMALL_GAIN)
        why = f"passes of {wanted} are {percent(faster)} faster by its curve"
    else:
        was_larger = f"shrunk {node}" in kept or any(was_barred(kept, rank) for rank in ranks)
        wanted = min(max(size + 1, int(size * table.grow)), bound) if was_larger or table.up == "on" else size
        why = f"it may grow below {percent(table.low)}"
    if wanted > size:
        made = _resized(facts, node, wanted, why, use, "info")
        yield dataclasses.replace(made, advise_only=table.up == "advise")


def _most(facts: RunFacts, memory: Memory, stepped: Stepped, ranks: list[int], size: int, use: float) -> int:
    """Return the largest micro-batch of a node by shares, settings, bars and predicted peaks."""
    largest = _largest_allowed(facts, memory, ranks)
    return min(largest, *(_within_cap(stepped, rank, size, use, largest) for rank in ranks))


def _largest_allowed(facts: RunFacts, memory: Memory, ranks: list[int]) -> int:
    table, kept = _table(facts), memory.kept
    bounds = [facts.durable.settings.ranks[rank].share for rank in ranks]
    bounds += [table.most] if table.most else []
    bounds += [bar - 1 for rank in ranks if (bar := barred_size(kept, rank, facts.step))]
    return min(bounds)


def _within_cap(stepped: Stepped, rank: int, size: int, use: float, largest: int) -> int:
    """Return the largest micro-batch whose predicted peak is below the cap by enough. Without a memory model, what the
    peak has beside weights, gradients and moments is taken in proportion to the size; where that isn't known, all."""
    values = stepped.reports[rank].values
    model, cap = stepped.memory_models.get(rank), values.get("memory_cap_bytes")
    if model is not None and cap:
        return model.most(MAX_CAP_PART * cap, largest)
    growing = values.get("memory_activations_bytes")
    if growing and cap:
        return max(1, int(size * (1 + (MAX_CAP_PART - use) * cap / growing)))
    return int(size * MAX_CAP_PART / use)


def _has_curves(stepped: Stepped, ranks: list[int]) -> bool:
    models = [stepped.models.get(rank) for rank in ranks]
    return all(model is not None and not model.is_linear for model in models)


def _fastest(
    facts: RunFacts, stepped: Stepped, ranks: list[int], size: int, sizes: range, least: float
) -> tuple[int, float]:
    """The smallest micro-batch of `sizes` that is the fastest for the shares of a node's ranks, and by which part they
    are faster; the same size if that is less than `least`."""
    shares = {rank: facts.durable.settings.ranks[rank].share for rank in ranks}

    def seconds(micro: int) -> float:
        return max(stepped.models[rank].busy_seconds(share, micro) for rank, share in shares.items())

    best = min(sizes, key=seconds, default=size)
    faster = seconds(size) / seconds(best)
    return (best, faster - 1) if faster >= 1 + least else (size, 0.0)


def _resized(facts: RunFacts, node: str, size: int, why: str, use: float, severity: FindingSeverity) -> Proposal:
    reason = f"mean peak memory over {_table(facts).window} steps: {percent(use)} of the cap; {why}"
    return resize(size, node, reason, severity)


class OutOfMemory(Policy):
    """Halves the micro-batch after a death for lack of memory. Nothing is left to halve at a micro-batch of 1."""

    name = "out-of-memory"
    occasions = MemoryDeath

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, MemoryDeath):
            return None
        settings, rank = facts.durable.settings, facts.occasion.rank
        edit = share_edits.halve(settings, rank)
        if edit.settings is settings:
            return None
        after = edit.settings.ranks[rank]
        return resize(after.micro_batch, after.node, f"out of memory, {facts.occasion.evidence}", "warning", edit)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        largest = max(setting.micro_in_force for setting in facts.durable.settings.ranks.values())
        figure = PolicyFigure("largest micro-batch", largest, unit="samples")
        return Assessment((figure,), "halves the micro-batch of a trainer that runs out of memory")


class Replays(Policy):
    """Keeps the size that fitted after a micro-batch that was run again in smaller pieces, whatever the share will be.

    A rank that ran out of memory would do so again in every step, and pay for it each time.
    """

    name = "replays"
    occasions = Replayed

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Replayed):
            return None
        settings, plan, report = facts.durable.settings, facts.occasion.plan, facts.occasion.report
        setting, fitted = settings.ranks[report.rank], report.micro_batch
        if not 0 < fitted < setting.micro_batch:
            return None
        smaller = msgspec.structs.replace(setting, micro_batch=fitted)
        planned = next(work.micro_batch for work in plan.work if work.rank == report.rank)
        change = MicroBatchChanged(((setting.node, planned),), ((setting.node, fitted),))
        edit = Edit(settings.edited(ranks={**settings.ranks, report.rank: smaller}), change)
        reason = "the rank ran out of memory and repeated a micro-batch in smaller pieces"
        return resize(fitted, setting.node, reason, "warning", edit)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        reports = facts.occasion.reports.values() if isinstance(facts.occasion, Stepped) else None
        repeated = sum(report.replays for report in reports) if reports is not None else None
        figure = PolicyFigure("micro-batches repeated in the last step", repeated, 0)
        return Assessment((figure,), "keeps the size that fitted, if a rank repeats a micro-batch in smaller pieces")
