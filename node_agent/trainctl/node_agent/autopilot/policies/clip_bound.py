"""Reports that clipping holds training back: nearly every step's gradient is scaled to a small part of itself."""

import statistics

from trainctl.node_agent.autopilot.policy import Advice, Assessment, Memory, Policy, RunFacts, Stepped
from trainctl.protocol import messages as m


class ClipBound(Policy):
    """It says so once, and again only after the median has recovered."""

    name = "clip-bound"
    is_about_curve = True

    def propose(self, facts: RunFacts, memory: Memory) -> Advice | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        table, report = facts.config.policy.clip_bound, facts.occasion.report
        if report.skipped is not None or "clip_scale" not in report.values:
            return None
        scales = memory.observe("scale", report.values["clip_scale"], table.steps)
        if len(scales) < table.steps:
            return None
        median, was_said = statistics.median(scales), memory.last("said")
        memory.observe("said", float(median < table.scale), 1)
        if median >= table.scale or was_said:
            return None
        return Advice(_said(facts, median))

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, scales = facts.config.policy.clip_bound, memory.evidence.get("scale", ())
        median = statistics.median(scales) if len(scales) == table.steps else None
        what = f"median clip scale of {table.steps} steps"
        figure = m.PolicyFigure(what, median, table.scale, acts="below")
        if median is not None and median < table.scale:
            return Assessment((figure,), _said(facts, median))
        return Assessment((figure,), f"reports a {what} below {table.scale:g}")


def _said(facts: RunFacts, median: float) -> str:
    limit, steps = facts.config.optimizer.clip_norm, facts.config.policy.clip_bound.steps
    text = f"the median clip scale of {steps} steps is {median:.2g}: gradient norms are far above"
    return f"{text} optimizer.clip_norm = {limit:g}; raise it, or lower the learning rate"


POLICY = ClipBound()
