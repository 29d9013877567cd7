"""Stops a run whose held-out loss has stopped improving for long, with a checkpoint."""

from collections.abc import Mapping, Sequence

from trainctl.node_agent.autopilot import plateaus
from trainctl.node_agent.autopilot.policy import Assessment, HeldOutLoss, Memory, Policy, Proposal, RunFacts
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import verbs

_STOPPED = "stopped"
"""Key of what it keeps: it has ended the run."""


class EarlyStop(Policy):
    """Who resumes a run that it has ended wants more of it: then it counts evaluations from 0 again."""

    name = "early-stop"
    occasions = HeldOutLoss

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, HeldOutLoss) or facts.step >= facts.config.run.steps:
            return None
        table = facts.config.policy.early_stop
        found = plateaus.detector(table.improvement, table.patience, memory.kept)
        is_reached = found.add(facts.occasion.step, facts.occasion.loss) is not None
        memory.kept |= plateaus.kept(found)
        if not is_reached:
            return None
        reason, once = plateaus.in_words(found), {_STOPPED: 1.0}
        return Proposal("stop", verbs.Stop(), reason, severity="warning", remember=once, is_urgent=True)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table = facts.config.policy.early_stop
        found = plateaus.detector(table.improvement, table.patience, memory.kept)
        why = f"writes a checkpoint and stops the run after {table.patience} of them"
        return Assessment(tuple(plateaus.figures(found, table.patience)), why)

    def gone_back(
        self, config: RunFile, kept: Mapping[str, float], evaluations: Sequence[tuple[int, float]]
    ) -> Mapping[str, float]:
        if not kept:
            return kept
        table = config.policy.early_stop
        found = plateaus.detector(table.improvement, table.patience, {})
        found.replay(evaluations)
        if _STOPPED in kept:
            plateaus.start_over(found)
        return plateaus.kept(found)


POLICY = EarlyStop()
