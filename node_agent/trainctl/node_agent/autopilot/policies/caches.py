"""Clears the allocators' caches when they are large, or every so many steps; the loss doesn't change."""

import statistics

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
    percent,
)
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs

WINDOW = 10
"""Steps whose mean counts."""
_CACHE = "cache "
"""What the names of observations begin with, before the rank's."""


class Caches(Policy):
    """A cache that is full again at once has a use: after each time it waits."""

    name = "caches"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        _observe(facts.occasion, memory)
        first = memory.kept.setdefault("step", float(facts.step))
        passed = facts.step - first
        if passed < 0:  # the run has gone back
            memory.kept["step"] = float(facts.step)
        return _wanted(facts, passed, _parts(facts, memory))

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, parts = facts.config.policy.caches, _parts(facts, memory)
        passed = facts.step - memory.kept.get("step", float(facts.step))
        fullest = max(parts.values(), default=None)
        figures = [
            m.PolicyFigure(f"largest cache, mean of {WINDOW} steps", fullest, table.fraction, "part"),
            m.PolicyFigure("steps since the last time", passed, table.every_steps or table.quiet_steps, acts="at"),
        ]
        otherwise = f"clears caches above {percent(table.fraction)} of the cap, {table.quiet_steps} steps apart"
        return assess(figures, _wanted(facts, passed, parts), otherwise)


def _wanted(facts: RunFacts, passed: float, parts: dict[str, float]) -> Proposal | None:
    """After `passed` steps since the last time; `parts`: of the cap, by node."""
    table = facts.config.policy.caches
    full = {node: part for node, part in parts.items() if part > table.fraction}
    if table.every_steps and passed >= table.every_steps:
        return _clear(facts, None, f"every {table.every_steps} steps")
    if not full or 0 <= passed < table.quiet_steps:
        return None
    node, part = max(full.items(), key=lambda each: each[1])
    said = f"{node}'s allocator keeps {percent(part)} of the cap unused, the mean of {WINDOW} steps"
    return _clear(facts, node if len(full) == 1 else None, said)


def _observe(stepped: Stepped, memory: Memory) -> None:
    for rank, report in sorted(stepped.reports.items()):
        part = m.of_cap(report.values, "cache")
        if part is not None:
            memory.observe(f"{_CACHE}{rank}", part, WINDOW)


def _parts(facts: RunFacts, memory: Memory) -> dict[str, float]:
    """The largest part of the cap that a rank's cache takes, by node: the mean over a whole window."""
    found: dict[str, float] = {}
    for rank, setting in facts.durable.settings.ranks.items():
        seen = memory.evidence.get(f"{_CACHE}{rank}", ())
        if len(seen) == WINDOW:
            found[setting.node] = max(statistics.fmean(seen), found.get(setting.node, 0.0))
    return found


def _clear(facts: RunFacts, node: str | None, reason: str) -> Proposal:
    return Proposal("defragment", verbs.Defragment(), reason, node, remember={"step": float(facts.step)})


POLICY = Caches()
