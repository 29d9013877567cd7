"""The advice as a whole: plans for sets of nodes, the fastest for a run and for independent work, the rest. Pure."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts, Source
from trainctl.protocol.advice.checklist import Check
from trainctl.protocol.advice.group_links import LINKS, GroupLink, link_of, on_one_machine
from trainctl.protocol.advice.memory_fit import SizeRange, cap_of, size_ranges
from trainctl.protocol.advice.node_speed import ERRORS, NodeSpeed, why_unknown
from trainctl.protocol.advice.plans import FORWARD_PART, JOULES_PER_KWH, Plan, plan_of, speeds_of, time_of
from trainctl.protocol.batch.device_table import DEVICES, USED_PART, device_of
from trainctl.protocol.batch.pass_curve import sum_seconds
from trainctl.protocol.calibration.peak import fastest_within_cap
from trainctl.protocol.calibration.profile import LinkRate
from trainctl.protocol.config.variables import Variable, platform_of, variables_for
from trainctl.protocol.messages.requests import SLICE_ROWS

LEAST_GAIN: Final = 0.02
"""Relative gain below which a change isn't worth naming."""
GROWTH: Final = (2, 4, 8)
"""Factors by which the global batch is tried larger."""
MOST_BATCH: Final = 2**24
"""Global batch up to which one is sought."""


class PlanChange(msgspec.Struct, frozen=True):
    """One change, and what it does to a plan."""

    change: str
    nodes: tuple[str, ...]
    samples_per_second: float  # with it
    gain: float  # relative to the plan as it is
    part_of_sum: float | None = None  # in step: relative to the sum of the nodes' rates apart
    beats_answer: bool = False  # whether that is faster than the answer
    needs: str = ""  # what trainctl doesn't have


def what_ifs(facts: AdviceFacts, sync: Plan | None, answer: Plan | None) -> tuple[PlanChange, ...]:
    """About the fastest plan in step, and the micro-batches of the answer. Empty if nothing is known."""
    found = [*_micro(facts, answer)] if answer is not None else []
    if sync is not None and sync.samples_per_second is not None:
        found += [*_links(facts, sync, answer), *_batches(facts, sync, answer), *_adapters(facts, sync, answer)]
    return tuple(one for one in found if one.gain >= LEAST_GAIN)


def batch_for(facts: AdviceFacts, sync: Plan, efficiency: float) -> int | None:
    """The smallest global batch at which the step of a group reaches this part of its nodes' rates apart; None if
    there is none up to MOST_BATCH. With rates R in sum and a sum of t seconds it is R t e / (1 - e), and slightly more
    because only whole samples can be shared."""
    low, high = len(sync.nodes), len(sync.nodes)
    while _efficiency(facts, sync, high) < efficiency:
        low, high = high, 2 * high
        if high > MOST_BATCH:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _efficiency(facts, sync, middle) >= efficiency else (middle, high)
    return high


def _efficiency(facts: AdviceFacts, sync: Plan, batch: int) -> float:
    return plan_of(facts, sync.nodes, "sync", global_batch=batch).efficiency or 0.0


def _links(facts: AdviceFacts, sync: Plan, answer: Plan | None) -> Iterator[PlanChange]:
    if on_one_machine(facts, sync.nodes):
        return
    now = link_of(facts, sync.nodes)
    is_apple = all(facts.node(name).system == "Darwin" for name in sync.nodes)
    for kind in LINKS:
        if kind.bytes_per_second > now.bytes_per_second and (is_apple or not kind.engine):
            link = GroupLink(kind.bytes_per_second, now.latency_seconds, now.measured, kind.name)
            plan = plan_of(facts, sync.nodes, "sync", link=link)
            yield _compared(kind.name, plan, sync, answer, f"engine {kind.engine}" if kind.engine else "")


def _batches(facts: AdviceFacts, sync: Plan, answer: Plan | None) -> Iterator[PlanChange]:
    for factor in GROWTH:
        batch = factor * facts.run.global_batch
        yield _compared(f"G = {batch:,}", plan_of(facts, sync.nodes, "sync", global_batch=batch), sync, answer)


def _adapters(facts: AdviceFacts, sync: Plan, answer: Plan | None) -> Iterator[PlanChange]:
    """Only the sum is counted: passes over adapters are faster too, by how much isn't known."""
    summed = facts.run.adapter_gradient_bytes
    if summed is not None:
        run = msgspec.structs.replace(facts.run, gradient_bytes=summed)
        plan = plan_of(msgspec.structs.replace(facts, run=run), sync.nodes, "sync")
        yield _compared("LoRA: fewer gradients to sum", plan, sync, answer)


def _micro(facts: AdviceFacts, answer: Plan) -> Iterator[PlanChange]:
    for name in answer.nodes:
        node = facts.node(name)
        if node.profile is not None:
            most = answer.shares.get(name, facts.run.global_batch)
            best = fastest_within_cap(node.profile.passes, most, cap_of(node)).micro
            changed = msgspec.structs.replace(node, micro=best)
            others = tuple(changed if one.name == name else one for one in facts.nodes)
            plan = plan_of(msgspec.structs.replace(facts, nodes=others), answer.nodes, answer.mode)
            yield _compared(f"micro-batch {best} on {name}", plan, answer, answer)


def _compared(change: str, plan: Plan, before: Plan, answer: Plan | None, needs: str = "") -> PlanChange:
    rate = plan.samples_per_second or 0.0
    gain = rate / before.samples_per_second - 1 if before.samples_per_second else 0.0
    is_sync = plan.mode == "sync"
    reached = answer.samples_per_second if answer is not None and answer.samples_per_second else 0.0
    beats = rate > reached and before != answer
    return PlanChange(change, plan.nodes, rate, gain, plan.efficiency if is_sync else None, beats, needs)


SLICE_SECONDS: Final = 2.0
"""Time that a slice takes, as it is dealt out."""
ROW_SECONDS: Final = 1e-4
"""Seconds that a row of some 100 tokens takes beside its forward pass, on one core: 65 us of the worker, to read and
tokenize it and to sum and encode its result, and 35 us of the agents. Measured with bytes as tokens."""
BETWEEN_SECONDS: Final = 0.1
"""Time between two slices of a node: its results travel to the lead, and the next rows to it."""


class ScoringRate(msgspec.Struct, frozen=True):
    """Rows per second while all nodes work."""

    nodes: dict[str, float]  # by node
    rows_per_second: float
    source: Source


def scoring_rate(facts: AdviceFacts) -> ScoringRate | None:
    """Return the rate of scoring; None if no node is known."""
    speeds = speeds_of(facts, [node.name for node in facts.nodes])
    if not speeds:
        return None
    rates = {name: _rate(speed) for name, speed in speeds.items()}
    measured = all(speed.forward is not None and speed.source == "measured" for speed in speeds.values())
    return ScoringRate(rates, sum(rates.values()), "measured" if measured else "estimated")


def _rate(speed: NodeSpeed) -> float:
    trained = speed.model.samples_per_second(speed.micro)
    rate = speed.forward.samples_per_second(speed.micro) if speed.forward is not None else trained / FORWARD_PART
    rate = 1 / (1 / rate + ROW_SECONDS)
    rows = max(1.0, min(SLICE_ROWS["log-probabilities"], SLICE_SECONDS * rate))
    return rows / (rows / rate + BETWEEN_SECONDS)


COUNT: Final = 8
_DEVICE: Final = DEVICES[0]
LEAST_SECONDS: Final = 0.02
"""Seconds of a step below which such a device waits for its host, so that its peak says nothing."""
OTHER_MEMORY: Final = 60_000_000
"""Bytes beside the trainer's estimate that a CUDA device needs at least."""


class ReferenceCluster(msgspec.Struct, frozen=True):
    """The estimated time of the run there, in bfloat16."""

    name: str
    fits: bool | None  # with the smallest micro-batch
    samples_per_second: float
    tokens_per_second: float
    step_seconds: float
    expected_seconds: float
    energy_kwh: float  # of the devices alone, at most
    assumed: str


def reference_of(facts: AdviceFacts) -> ReferenceCluster | None:
    """Return the reference cluster; None if the model's sizes aren't known, the global batch has too few samples, or
    its steps would be too short to keep such devices busy."""
    run, flops = facts.run, facts.run.sample_flops
    if not flops or run.gradient_bytes is None or run.global_batch < COUNT:
        return None
    share = -(-run.global_batch // COUNT)
    link = LinkRate("", _DEVICE.nvlink_bytes_per_second, _DEVICE.nvlink_bytes_per_second)
    step = share * flops / (USED_PART * _DEVICE.tflops * 1e12) + sum_seconds(run.gradient_bytes, COUNT, [link])
    left = time_of(facts, step, ERRORS["estimated"], [facts.nodes[0].name])
    if step < LEAST_SECONDS:
        return None
    rate = run.global_batch / step
    estimates = [int(node.memory.peak(1)) for node in facts.nodes if node.memory is not None]
    return ReferenceCluster(
        name=f"{COUNT} x {_DEVICE.name}",
        fits=min(estimates) + run.gradient_bytes + OTHER_MEMORY <= _DEVICE.memory_bytes if estimates else None,
        samples_per_second=rate,
        tokens_per_second=rate * run.tokens_per_sample,
        step_seconds=step,
        expected_seconds=left.expected,
        energy_kwh=COUNT * _DEVICE.watts * left.expected / JOULES_PER_KWH,
        assumed=f"bfloat16 at {USED_PART:.0%} of {_DEVICE.tflops:.0f} TFLOPS each, NVLink",
    )


ALL_SETS: Final = 5
"""Nodes up to which every set of them is looked at; of more, each alone, and the fastest 2, 3 ... together."""
CLOSE: Final = 0.02
"""Relative gain below which more machines aren't worth their trouble."""
MUCH_SUM: Final = 0.1
"""Part of a step that sums gradients from which faster engines are named."""


class BatchSize(msgspec.Struct, frozen=True):
    """The global batch from which a group is nearly as fast as its nodes apart."""

    nodes: tuple[str, ...]
    efficiency: float
    global_batch: int | None  # None: there is none
    rate_sum: float  # R: samples per second of all nodes apart
    sum_seconds: float  # t: of the sum of gradients


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """All of it."""

    answer: Plan | None  # the fastest way to do this run; None: nothing that is known can run it
    independent: Plan | None  # the fastest for work that needs no common weights, such as several runs, or scoring
    plans: tuple[Plan, ...]  # the fastest first; those that can't run last
    batch_sizes: tuple[BatchSize, ...] = ()
    what_ifs: tuple[PlanChange, ...] = ()
    scoring: ScoringRate | None = None
    model_sizes: tuple[SizeRange, ...] = ()
    reference: ReferenceCluster | None = None
    checklist: tuple[Check, ...] = ()
    variables: tuple[Variable, ...] = ()
    needs: tuple[str, ...] = ()  # what trainctl doesn't do, and where it would be needed
    unknown: dict[str, str] = {}  # nodes of which nothing is known, with the reason


def advise(facts: AdviceFacts, checks: tuple[Check, ...] = ()) -> Advice:
    """The advice for a run on a cluster."""
    plans = sorted(_plans(facts), key=lambda plan: (not plan.can_run, -(plan.samples_per_second or 0.0)))
    in_step = [plan for plan in plans if plan.mode == "sync" and plan.can_run]
    answer = _fastest([plan for plan in plans if plan.mode != "separate" and plan.can_run])
    independent = _fastest([plan for plan in plans if plan.mode != "sync" and plan.can_run])
    sync = in_step[0] if in_step else None
    rates = {plan.nodes[0]: plan.samples_per_second or 0.0 for plan in plans if plan.mode == "alone" and plan.can_run}
    return Advice(
        answer=answer,
        independent=independent,
        plans=tuple(plans),
        batch_sizes=tuple(_batch_sizes(facts, sync)),
        what_ifs=what_ifs(facts, sync, answer),
        model_sizes=size_ranges(facts.nodes, rates),
        reference=reference_of(facts),
        scoring=scoring_rate(facts),
        checklist=checks,
        variables=variables_for({platform_of(node.system, node.device) for node in facts.nodes}),
        needs=tuple(_needs(facts, plans, sync)),
        unknown={
            plan.nodes[0]: why_unknown(facts.node(plan.nodes[0]), facts.run)
            for plan in plans
            if plan.mode == "alone" and plan.source == "unknown"
        },
    )


def _plans(facts: AdviceFacts) -> Iterator[Plan]:
    alone = {node.name: plan_of(facts, [node.name], "alone") for node in facts.nodes}
    yield from alone.values()
    known = [name for name, plan in alone.items() if plan.source != "unknown"]
    known.sort(key=lambda name: -(alone[name].samples_per_second or 0.0))
    for names in _sets(known):
        ordered = [node.name for node in facts.nodes if node.name in names]
        yield plan_of(facts, ordered, "sync")
        yield plan_of(facts, ordered, "separate")


def _sets(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for count in range(2, len(names) + 1):
        yield from combinations(names, count) if len(names) <= ALL_SETS else [names[:count]]


def _fastest(plans: Sequence[Plan]) -> Plan | None:
    if not plans:
        return None
    best = max(plan.samples_per_second or 0.0 for plan in plans)
    close = [plan for plan in plans if (plan.samples_per_second or 0.0) >= (1 - CLOSE) * best]
    return min(close, key=lambda plan: (len(plan.nodes), -(plan.samples_per_second or 0.0)))


def _batch_sizes(facts: AdviceFacts, sync: Plan | None) -> Iterator[BatchSize]:
    if sync is None or not sync.sum_seconds or not sync.samples_per_second or not sync.efficiency:
        return
    apart = sync.samples_per_second / sync.efficiency
    for efficiency in (0.9, 0.95):
        batch = batch_for(facts, sync, efficiency)
        yield BatchSize(sync.nodes, efficiency, batch, apart, sync.sum_seconds)


def _needs(facts: AdviceFacts, plans: Sequence[Plan], sync: Plan | None) -> Iterator[str]:
    known = [plan for plan in plans if plan.source != "unknown"]
    if known and not any(plan.can_run for plan in known):
        yield (
            "sharding: no node's memory holds the model. trainctl doesn't shard a model (FSDP, ZeRO, pipeline): reduce "
            "memory by LoRA or a 4-bit base, or attach such a job as a guest (docs/scripting.md)"
        )
    if sync is None or not sync.sum_seconds or sync.sum_seconds < MUCH_SUM * (sync.step_seconds or 0.0):
        return
    nodes = [facts.node(name) for name in sync.nodes]
    part, link = sync.sum_seconds / (sync.step_seconds or 1.0), link_of(facts, sync.nodes).name
    spent = f"sums take {part:.0%} of a step over {link}"
    if all(device_of(node.device) is not None or "nvidia" in node.device.lower() for node in nodes):
        yield f"NCCL: {spent}. Between NVIDIA GPUs NCCL is faster; trainctl's engines are gloo and ring"
    if all(node.system == "Darwin" for node in nodes):
        yield f"RDMA: {spent}. MLX's engine jaccl uses RDMA over Thunderbolt 5; trainctl doesn't offer it yet"
