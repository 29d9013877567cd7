"""After a micro-batch that was run again in smaller pieces: the size that fitted, whatever the share will be."""

import msgspec

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Memory,
    Policy,
    Proposal,
    Replayed,
    RunFacts,
    Stepped,
    resize,
)
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol import messages as m
from trainctl.protocol.messages import events as e


class Replays(Policy):
    """A rank that ran out of memory would do so again in every step, and pay for it each time."""

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
        change = e.MicroBatchChanged(((setting.node, planned),), ((setting.node, fitted),))
        edit = Edit(settings.edited(ranks={**settings.ranks, report.rank: smaller}), change)
        reason = "the rank ran out of memory and repeated a micro-batch in smaller pieces"
        return resize(fitted, setting.node, reason, "warning", edit)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        reports = facts.occasion.reports.values() if isinstance(facts.occasion, Stepped) else None
        repeated = sum(report.replays for report in reports) if reports is not None else None
        figure = m.PolicyFigure("micro-batches repeated in the last step", repeated, 0)
        return Assessment((figure,), "keeps the size that fitted, if a rank repeats a micro-batch in smaller pieces")


POLICY = Replays()
