"""Lowers the learning rate of a run whose loss keeps rising and stays far above its best level."""

from collections.abc import Sequence

from trainctl.node_agent.autopilot.policy import Memory, Policy, Proposal, RunFacts, Stepped
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.protocol import messages as m
from trainctl.protocol.analysis.divergence import DivergenceDetector
from trainctl.protocol.config.policies import DivergenceTable
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import verbs

_AHEAD = 2
"""Steps after the last one at which a command takes effect: the next step is planned by then."""


class Divergence(Policy):
    """After each time it waits, so that the lower rate can have an effect."""

    name = "divergence"
    is_about_curve = True

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        table, config = facts.config.policy.divergence, facts.config
        found = _detector(table, memory).add(facts.step, facts.occasion.loss)
        last = memory.kept.get("step", float("-inf"))
        if found is None or last <= facts.step < last + table.quiet_steps:
            return None
        step = min(facts.step + _AHEAD, config.run.steps)
        lower = rate(facts.durable.settings.lr, config.optimizer, config.run.steps, step) * table.factor
        reason = f"loss at {found.level:.4g} and rising, {found.steps} steps far above {found.best.level:.4g}"
        return Proposal(
            "set-lr", verbs.SetLr(value=lower), f"{reason} of step {found.best.step}", severity="error",
            quiet={"step": float(facts.step)},
        )  # fmt: skip

    def replay(self, config: RunFile, memory: Memory, steps: Sequence[m.StepCommitted]) -> None:
        _detector(config.policy.divergence, memory).replay(steps)


def _detector(table: DivergenceTable, memory: Memory) -> DivergenceDetector:
    made = DivergenceDetector(table.mads, table.steps, table.past_steps)
    found: DivergenceDetector = memory.evidence.setdefault("detector", made)
    return found


POLICY = Divergence()
