"""Scales the rest of the learning-rate schedule down when the held-out loss has stopped improving.

The lower rate is in the settings of the next step, like every change of the schedule: a run that goes back to a
checkpoint takes both up as they were there, the rate and the evaluations that were counted.
"""

from collections.abc import Mapping, Sequence

from trainctl.node_agent.autopilot import plateaus
from trainctl.node_agent.autopilot.policy import Assessment, HeldOutLoss, Memory, Policy, Proposal, RunFacts
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.analysis.loss_trends import PlateauDetector
from trainctl.protocol.config.policies import PlateauTable
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import events as e
from trainctl.protocol.messages import verbs


class Plateau(Policy):
    """After each cut some evaluations don't count, so that the lower rate can have an effect."""

    name = "plateau"
    occasions = HeldOutLoss

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, HeldOutLoss) or facts.step >= facts.config.run.steps:
            return None
        table = facts.config.policy.plateau
        found = plateaus.detector(table.improvement, table.patience, memory.kept)
        proposal = None
        if found.add(facts.occasion.step, facts.occasion.loss) is not None:
            proposal = _cut(facts, plateaus.in_words(found))
            plateaus.start_over(found, table.cooldown)
        memory.kept |= plateaus.kept(found)
        return proposal

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table = facts.config.policy.plateau
        found = plateaus.detector(table.improvement, table.patience, memory.kept)
        why = f"multiplies the rest of the learning-rate schedule by {table.factor:g} after {table.patience} of them"
        return Assessment(tuple(plateaus.figures(found, table.patience)), why)

    def gone_back(
        self, config: RunFile, kept: Mapping[str, float], evaluations: Sequence[tuple[int, float]]
    ) -> Mapping[str, float]:
        return plateaus.kept(_counted(config.policy.plateau, evaluations)) if kept else kept


def _counted(table: PlateauTable, evaluations: Sequence[tuple[int, float]]) -> PlateauDetector:
    found = PlateauDetector(table.improvement, table.patience)
    for step, loss in evaluations:
        if found.add(step, loss) is not None:
            plateaus.start_over(found, table.cooldown)
    return found


def _cut(facts: RunFacts, reason: str) -> Proposal | None:
    """The rest of the schedule times the factor, from the next step on; nothing below the least rate."""
    table, settings, config = facts.config.policy.plateau, facts.durable.settings, facts.config
    step = min(facts.step + 1, config.run.steps)
    lower = settings.lr.scaled(table.factor)
    before, after = (rate(rule, config.optimizer, config.run.steps, step) for rule in (settings.lr, lower))
    if after < table.least_rate or after == before:
        return None
    change = e.LearningRateChanged(before, after, "scale", settings.lr.kind == "constant")
    edit = Edit(settings.edited(lr=lower), change)
    return Proposal("set-lr", verbs.SetLr(value=after), reason, edit=edit, severity="warning")


POLICY = Plateau()
