"""Loss that keeps rising or isn't finite: a lower learning rate, or a checkpoint and a pause."""

from collections.abc import Sequence
from math import inf

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
    mode_of,
)
from trainctl.node_agent.planning.lr_schedule import rate
from trainctl.protocol.analysis.loss_trends import Divergence as Found
from trainctl.protocol.analysis.loss_trends import DivergenceDetector
from trainctl.protocol.config.policies import DivergenceTable
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import PolicyFigure, Report, StepCommitted, verbs

_AHEAD = 2
"""Steps after the last one at which a command takes effect: the next step is planned by then."""


class Divergence(Policy):
    """Lowers the learning rate of a run whose loss keeps rising and stays far above its best level.

    After each time it waits, so that the lower rate can have an effect; if it only advises, so as not to repeat it at
    each step. Who turns it on then doesn't wait for that.
    """

    name = "divergence"
    is_about_curve = True

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        table = facts.config.policy.divergence
        found = _detector(table, memory).add(facts.step, facts.occasion.loss)
        return self._wanted(facts, memory, found)

    def _wanted(self, facts: RunFacts, memory: Memory, found: Found | None) -> Proposal | None:
        table, config = facts.config.policy.divergence, facts.config
        if found is None:
            return None
        is_advising = mode_of(config, facts.durable, self.name) == "advise"
        quiet = (memory.kept.get(name, -inf) for name in ("step", *(["advised"] if is_advising else [])))
        if any(last <= facts.step < last + table.quiet_steps for last in quiet):
            return None
        step = min(facts.step + _AHEAD, config.run.steps)
        lower = rate(facts.durable.settings.lr, config.optimizer, config.run.steps, step) * table.factor
        reason = f"loss at {found.level:.4g} and rising, {found.steps} steps far above {found.best.level:.4g}"
        return Proposal(
            "set-lr", verbs.SetLr(value=lower), f"{reason} of step {found.best.step}", severity="error",
            remember={"step": float(facts.step)}, quiet={"advised": float(facts.step)},
        )  # fmt: skip

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, detector = facts.config.policy.divergence, _detector(facts.config.policy.divergence, memory)
        figures = [
            PolicyFigure("loss level above its best", detector.above, table.mads, "scatters"),
            PolicyFigure("steps in a row so far above", detector.steps, table.past_steps, acts="at"),
            PolicyFigure(f"rise of the loss over {table.steps} steps", detector.rise, 1.0, "scatters"),
        ]
        otherwise = f"multiplies the rest of the learning-rate schedule by {table.factor:g} if all are above"
        return assess(figures, self._wanted(facts, memory, detector.divergence), otherwise)

    def replay(self, config: RunFile, memory: Memory, steps: Sequence[StepCommitted]) -> None:
        _detector(config.policy.divergence, memory).replay(steps)


def _detector(table: DivergenceTable, memory: Memory) -> DivergenceDetector:
    found: DivergenceDetector | None = memory.evidence.get("detector")
    if found is None:
        found = memory.evidence["detector"] = DivergenceDetector(table.mads, table.steps, table.past_steps)
    return found


class NonFinite(Policy):
    """After several steps in a row that weren't finite: a checkpoint of the last good parameters, and a pause.

    Such steps leave the parameters as they are, but a run that makes no others only costs time.

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
        figure = PolicyFigure("steps in a row that weren't finite", bad, wanted, acts="at")
        return Assessment((figure,), f"after {wanted} such steps it writes a checkpoint and pauses the run")


def _is_bad(facts: RunFacts, report: Report) -> bool:
    """In float16 an overflow is usual: it halves the loss scale, and the next step may do."""
    return report.skipped == "nan" or (report.skipped == "overflow" and facts.config.model.computed != "float16")
