"""After a lack of memory: a smaller micro-batch, before the rank comes back or for the steps that follow."""

import msgspec

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Memory,
    MemoryDeath,
    Policy,
    Proposal,
    Replayed,
    RunFacts,
    Stepped,
    resize,
)
from trainctl.node_agent.planning import share_edits
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.messages import PolicyFigure
from trainctl.protocol.messages.events import MicroBatchChanged


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
