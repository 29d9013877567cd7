"""Healthy facts of a run, changed a little for one rule at a time."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
from tests.protocol.support import planted_causes as simulated

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.diagnosis.diagnose import diagnose
from trainctl.protocol.analysis.diagnosis.diagnosis_facts import DiagnosisFacts
from trainctl.protocol.messages.events import AnyEvent

STEPS = 150


def healthy_facts(seed: int = 1) -> DiagnosisFacts:
    made, kept = simulated.healthy(seed, STEPS)
    return simulated.facts(made, kept)


def uneven_facts(steps: int = STEPS) -> DiagnosisFacts:
    """Make facts of two ranks, of which `node-0` has too large a share from the start."""
    made = simulated.cluster(1)
    made.nodes[0].share, made.nodes[1].share = made.nodes[0].share + 16, made.nodes[1].share - 16
    return simulated.facts(made, simulated.record(made, steps, steps))


def scaled(facts: DiagnosisFacts, part: float) -> DiagnosisFacts:
    """Return the facts with steps that take this part of their seconds."""

    def shorter(row: m.RankStep) -> m.RankStep:
        phases = m.Phases(**{name: part * getattr(row.phases, name) for name in m.PHASES})
        return msgspec.structs.replace(row, phases=phases, step_seconds=part * row.step_seconds)

    steps = tuple(msgspec.structs.replace(step, step_seconds=part * step.step_seconds) for step in facts.steps)
    return dataclasses.replace(facts, parts=tuple(map(shorter, facts.parts)), steps=steps)


def with_readings(facts: DiagnosisFacts, node: str, values: Mapping[str, float], **fields: Any) -> DiagnosisFacts:
    """Set these metrics in all readings of a node's last 50 s, and other fields."""
    since = facts.at - 50
    changed = tuple(
        msgspec.structs.replace(one, values={**one.values, **values}, **fields) if one.read_at >= since else one
        for one in facts.readings[node]
    )
    return dataclasses.replace(facts, readings={**facts.readings, node: changed})


def with_gpu(facts: DiagnosisFacts, node: str, **fields: Any) -> DiagnosisFacts:
    """Set these fields in all readings of a node's GPU in the last 50 s."""
    gpu = msgspec.structs.replace(facts.readings[node][-1].gpus[0], **fields)
    return with_readings(facts, node, {}, gpus=(gpu,))


def with_parts(
    facts: DiagnosisFacts, change: Callable[[m.RankStep], m.RankStep], newest: int = STEPS
) -> DiagnosisFacts:
    after = facts.steps[-1].step - newest
    parts = tuple(change(part) if part.step > after else part for part in facts.parts)
    return dataclasses.replace(facts, parts=parts)


def with_steps(
    facts: DiagnosisFacts, change: Callable[[m.StepCommitted], m.StepCommitted], newest: int = STEPS
) -> DiagnosisFacts:
    after = facts.steps[-1].step - newest
    steps = tuple(change(step) if step.step > after else step for step in facts.steps)
    return dataclasses.replace(facts, steps=steps)


def longer(facts: DiagnosisFacts, rank: int, phases: Mapping[str, float], newest: int = 40) -> DiagnosisFacts:
    """Make a rank's phases longer by these factors in the newest steps; all others wait for it."""

    def change(part: m.RankStep) -> m.RankStep:
        base = grown.get(part.step, 0.0)
        if part.rank != rank:
            waits = msgspec.structs.replace(part.phases, sync=part.phases.sync + base)
            return msgspec.structs.replace(part, phases=waits, step_seconds=part.step_seconds + base)
        own = {name: getattr(part.phases, name) * factor for name, factor in phases.items()}
        return msgspec.structs.replace(
            part, phases=msgspec.structs.replace(part.phases, **own), step_seconds=part.step_seconds + base
        )

    after = facts.steps[-1].step - newest
    grown = {
        part.step: sum((factor - 1) * getattr(part.phases, name) for name, factor in phases.items())
        for part in facts.parts if part.rank == rank and part.step > after
    }  # fmt: skip
    made = with_parts(facts, change, newest)
    return with_steps(
        made, lambda step: msgspec.structs.replace(step, step_seconds=step.step_seconds + grown[step.step]), newest
    )


def with_event(facts: DiagnosisFacts, data: AnyEvent, at: float | None = None) -> DiagnosisFacts:
    event = m.Event(
        id=10_000 + len(facts.events), at=at if at is not None else facts.at, severity="warning", by="auto", data=data,
        run="run", step=facts.steps[-1].step,
    )  # fmt: skip
    return dataclasses.replace(facts, events=(*facts.events, event))


def first(facts: DiagnosisFacts) -> m.Finding:
    findings = diagnose(facts).findings
    assert findings, "nothing was found"
    return findings[0]


def causes(facts: DiagnosisFacts) -> list[str]:
    return [finding.cause for finding in diagnose(facts).findings]


def said_of(facts: DiagnosisFacts, cause: str) -> list[tuple[str, str]]:
    """Return the result and text of each check of a cause."""
    return [(one.result, one.text) for one in diagnose(facts).checked if one.cause == cause]


def commands(finding: m.Finding) -> list[str]:
    return [remedy.command for remedy in finding.remedies if remedy.command]
