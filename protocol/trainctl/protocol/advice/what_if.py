"""Changes that would change the answer: faster links, a larger global batch, the peak micro-batch, adapters. Pure."""

from collections.abc import Iterator
from typing import Final

import msgspec

from trainctl.protocol.advice.advice_facts import AdviceFacts
from trainctl.protocol.advice.group_links import LINKS, GroupLink, link_of, on_one_machine
from trainctl.protocol.advice.memory_fit import cap_of
from trainctl.protocol.advice.plans import Plan, plan_of
from trainctl.protocol.calibration.peak import fastest_within_cap

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
    """Yield a change to each node's micro-batch at the peak of its curve."""
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
