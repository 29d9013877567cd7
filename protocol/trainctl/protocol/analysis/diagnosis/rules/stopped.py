"""Causes that stop the training, or make its steps worthless: a hang, too little memory, NaN and overflow."""

import dataclasses
from collections.abc import Iterator, Sequence

from trainctl.protocol.analysis.curve import RECENT_STEPS, Wasted
from trainctl.protocol.analysis.diagnosis.rule import Clear, Found, Unknown, Verdict
from trainctl.protocol.analysis.diagnosis.situation import Situation, megabytes
from trainctl.protocol.config.alert_rules import stall_limit_seconds
from trainctl.protocol.messages import Event, RankStep, StepCommitted
from trainctl.protocol.messages.event_prose import seconds
from trainctl.protocol.messages.events import AnyEvent, MicroBatchChanged, RankChanged, nodes_of

REPEATED_STEPS = 3
"""Steps with repeated passes from which memory is short."""


def hang(s: Situation) -> Iterator[Verdict]:
    """No step for far longer than a step takes, in a run that isn't meant to wait."""
    facts, view = s.facts, s.facts.view
    if not facts.is_live:
        yield _hung_at_end(s)
    elif view is not None and (view.state != "running" or view.reason):
        yield Clear(f"the run is {view.state}{f': {view.reason}' if view.reason else ''}")
    elif facts.step_age_seconds is None:
        yield Unknown("the age of the last step")
    elif facts.step_age_seconds > stall_limit_seconds(s.alerts, facts.doing, s.step_seconds):
        yield _hung(s, f"no step for {seconds(facts.step_age_seconds)}{_usually(s)}")
    else:
        yield Clear(f"the last step was {seconds(facts.step_age_seconds)} ago")


def _usually(s: Situation) -> str:
    return f"; a step usually takes {seconds(s.step_seconds)}" if s.step_seconds is not None else ""


def _hung(s: Situation, first: str) -> Found:
    views = s.facts.view.ranks if s.facts.view is not None else ()
    blamed = [view for view in views if view.state in ("hung", "late", "lost", "failed")]
    states = [f"rank {view.rank} on {view.node} is {view.state}{f': {view.why}' if view.why else ''}" for view in views]
    rank = blamed[0] if len(blamed) == 1 else None
    who = f": {rank.node} is {rank.state}" if rank else ""
    where = {"rank": rank.rank, "node": rank.node} if rank else {"rank": views[0].rank if views else 0}
    doing = (f"{s.facts.doing} is in progress",) if s.facts.doing != "train" else ()
    return Found(
        f"the run makes no progress{who}",
        (first, *doing, *states),
        rank.node if rank else "",
        rank.rank if rank else None,
        severity="error",
        values=where,
    )


def _hung_at_end(s: Situation) -> Verdict:
    """Judge, in a record, whether a rank hung, and no step was committed after it."""
    last = s.facts.steps[-1].committed_at if s.facts.steps else 0.0
    for event in reversed(s.events(RankChanged)):
        if event.data.state == "hung" and event.at >= last:
            found = _hung(s, f"no step after this: {event.text}")
            return dataclasses.replace(found, title=f"the run made no progress: {', '.join(event.data.ranks)} hung")
    return Clear("no rank hung after the last step") if s.facts.steps else Unknown("steps")


def out_of_memory(s: Situation) -> Iterator[Verdict]:
    """Passes that are repeated in smaller pieces, or ranks that ended for lack of memory."""
    steps = {step.step for step in s.newest(RECENT_STEPS)}
    if not steps:
        yield Unknown("steps")
        return
    died = [one for one in s.events(RankChanged, MicroBatchChanged) if _is_death(one.data) and _is_recent(one, steps)]
    for rank in {part.rank for part in s.facts.parts}:
        parts = [part for part in s.facts.parts if part.rank == rank and part.step in steps]
        repeated = [part for part in parts if part.replays]
        if len(repeated) >= REPEATED_STEPS:
            yield _short_of_memory(s, parts[-1], (f"{len(repeated)} of the last {len(parts)} steps repeated passes",))
    if died:
        yield _died(s, died)
    if not died and not any(part.replays for part in s.facts.parts if part.step in steps):
        yield Clear(f"no pass of the last {len(steps)} steps ran out of memory")


def _is_death(data: AnyEvent) -> bool:
    """A rank that has ended for lack of memory: restarted with a smaller micro-batch, or at one sample already."""
    halved = isinstance(data, MicroBatchChanged) and data.cause.startswith("out of memory")
    return halved or (isinstance(data, RankChanged) and data.state == "out-of-memory")


def _died(s: Situation, events: Sequence[Event]) -> Found:
    newest = events[-1].data
    nodes = sorted(nodes_of(newest))
    micro = max((s.ranks[rank].micro for node in nodes for rank in s.ranks_of(node)), default=0)
    is_given_up = isinstance(newest, RankChanged)
    values = {"node": nodes[0] if nodes else None, "smaller": micro // 2 if micro > 1 and not is_given_up else None}
    who = nodes[0] if nodes else "a rank"
    return Found(
        f"{who} ran out of memory",
        tuple(event.text for event in events[-3:]),
        nodes[0] if nodes else "",
        severity="error",
        values=values,
    )


def _is_recent(event: Event, steps: set[int]) -> bool:
    return event.step is not None and event.step >= min(steps)


def _short_of_memory(s: Situation, part: RankStep, evidence: tuple[str, ...]) -> Found:
    peak, cap, micro = part.peak_or_held_bytes, part.memory_cap_bytes, part.micro_batch
    held = (f"peak {megabytes(peak)} of {megabytes(cap)}",) if peak and cap else ()
    smaller = max(micro // 2, 1) if micro and micro > 1 else None
    values = {"node": part.node, "smaller": smaller, "rank": part.rank}
    return Found(
        f"{s.label(part.rank)} runs out of memory",
        (*evidence, *held),
        part.node,
        part.rank,
        severity="error",
        values=values,
    )


def not_finite(s: Situation) -> Iterator[Verdict]:
    """Steps whose loss or gradient is NaN: they train nothing."""
    yield from _skipped(s, "not-finite", "gradients or losses are NaN")


def overflow(s: Situation) -> Iterator[Verdict]:
    """Steps whose gradients overflow in float16."""
    yield from _skipped(s, "overflow", "gradients overflow")


def _skipped(s: Situation, why: Wasted, title: str) -> Iterator[Verdict]:
    wasted = {*s.judge.wasted(why)}
    newest = s.newest(RECENT_STEPS)
    bad = [step for step in newest if step.step in wasted]
    is_fault = s.judge.are_many_wasted(why) or (why == "not-finite" and not s.judge.is_finite)
    if not newest:
        yield Unknown("steps")
    elif not is_fault:
        yield Clear(f"{len(bad)} of the last {len(newest)} steps: {why}")
    else:
        evidence = (f"{len(bad)} of the last {len(newest)} steps, the newest {bad[-1].step:,}", *_rates(bad[-1]))
        half = (bad[-1].learning_rate or 0.0) / 2 or None
        values = {"half_rate": f"{half:.3g}" if half else None, "back": s.checkpoint_before(bad[0].step)}
        yield Found(title, evidence, severity="error", values=values)


def _rates(step: StepCommitted) -> tuple[str, ...]:
    return (f"learning rate {step.learning_rate:.3g} there",) if step.learning_rate is not None else ()
