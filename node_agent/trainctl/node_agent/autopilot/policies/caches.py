"""Clears the allocators' caches when they are large, or every so many steps; the loss doesn't change."""

import statistics

from trainctl.node_agent.autopilot.policy import Memory, Policy, Proposal, RunFacts, Stepped, percent
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs

WINDOW = 10
"""Steps whose mean counts."""


class Caches(Policy):
    """A cache that is full again at once has a use: after each time it waits."""

    name = "caches"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        table, full = facts.config.policy.caches, _full(facts, facts.occasion, memory)
        first = memory.kept.setdefault("step", float(facts.step))
        passed = facts.step - first
        if passed < 0:  # the run has gone back
            memory.kept["step"] = float(facts.step)
        if table.every_steps and passed >= table.every_steps:
            return _clear(facts, None, f"every {table.every_steps} steps")
        if not full or 0 <= passed < table.quiet_steps:
            return None
        node, part = max(full.items(), key=lambda each: each[1])
        return _clear(
            facts, node if len(full) == 1 else None,
            f"{node}'s allocator keeps {percent(part)} of the cap unused, the mean of {WINDOW} steps",
        )  # fmt: skip


def _full(facts: RunFacts, stepped: Stepped, memory: Memory) -> dict[str, float]:
    """The part of its cap that a node's cache takes, of those where it is too large."""
    found: dict[str, float] = {}
    for rank, report in sorted(stepped.reports.items()):
        part = m.of_cap(report.values, "cache")
        if part is None:
            continue
        seen = memory.observe(f"cache {rank}", part, WINDOW)
        if len(seen) == WINDOW and (mean := statistics.fmean(seen)) > facts.config.policy.caches.fraction:
            node = facts.durable.settings.ranks[rank].node
            found[node] = max(mean, found.get(node, 0.0))
    return found


def _clear(facts: RunFacts, node: str | None, reason: str) -> Proposal:
    return Proposal("defragment", verbs.Defragment(), reason, node, remember={"step": float(facts.step)})


POLICY = Caches()
