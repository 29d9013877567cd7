"""After several steps in a row that weren't finite: a checkpoint of the last good parameters, and a pause."""

from trainctl.node_agent.autopilot.policy import Assessment, Memory, Policy, Proposal, RunFacts, Stepped
from trainctl.protocol import messages as m
from trainctl.protocol.messages import verbs


class NonFinite(Policy):
    """Such steps leave the parameters as they are, but a run that makes no others only costs time.

    It acts once in a generation: a resume after the pause begins another one, with new evidence.
    """

    name = "non-finite"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        wanted = facts.config.policy.non_finite.steps
        looks = memory.observe("bad", float(_is_bad(facts, facts.occasion.report)), wanted)
        if sum(looks) < wanted:
            return None
        reason = f"{wanted} steps in a row were not finite, up to step {facts.step}"
        checkpoint = Proposal("checkpoint", verbs.Checkpoint(), reason)
        return Proposal("pause", verbs.Pause(), reason, severity="error", before=checkpoint, is_urgent=True)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        wanted = facts.config.policy.non_finite.steps
        looks = memory.evidence.get("bad", ())
        bad = next((number for number, is_bad in enumerate(reversed(looks)) if not is_bad), len(looks))
        figure = m.PolicyFigure("steps in a row that weren't finite", bad, wanted, acts="at")
        return Assessment((figure,), f"after {wanted} such steps it writes a checkpoint and pauses the run")


def _is_bad(facts: RunFacts, report: m.Report) -> bool:
    """In float16 an overflow is usual: it halves the loss scale, and the next step may do."""
    return report.skipped == "nan" or (report.skipped == "overflow" and facts.config.model.computed != "float16")


POLICY = NonFinite()
