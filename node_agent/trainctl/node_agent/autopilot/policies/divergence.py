"""Loss that keeps rising or isn't finite: a lower learning rate, or a checkpoint and a pause."""

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
from trainctl.node_agent.planning.plans import rate
from trainctl.protocol.messages import PolicyFigure, verbs

_AHEAD = 2
"""Steps after the last one at which a command takes effect: the next step is planned by then."""


class Divergence(Policy):
    """Lowers the learning rate of a run whose loss keeps rising and stays far above its best level.

    After each time it waits, so that the lower rate can have an effect; if it only advises, so as not to repeat it at
    each step. Who turns it on then doesn't wait for that.
    """

    name = "divergence"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        return self._wanted(facts, memory) if isinstance(facts.occasion, Stepped) else None

    def _wanted(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        table, config, rising = facts.config.policy.divergence, facts.config, facts.curve.divergence
        if rising is None:
            return None
        is_advising = mode_of(config, facts.durable, self.name) == "advise"
        quiet = (memory.kept.get(name, -inf) for name in ("step", *(["advised"] if is_advising else [])))
        if any(last <= facts.step < last + table.quiet_steps for last in quiet):
            return None
        step = min(facts.step + _AHEAD, config.run.steps)
        lower = rate(facts.durable.settings.lr, config.optimizer, config.run.steps, step) * table.factor
        reason = f"loss at {rising.level:.4g} and rising, {rising.steps} steps far above {rising.best.level:.4g}"
        return Proposal(
            "set-lr",
            verbs.SetLr(value=lower),
            f"{reason} of step {rising.best.step}",
            severity="error",
            remember={"step": float(facts.step)},
            quiet={"advised": float(facts.step)},
        )

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, detector = facts.config.policy.divergence, facts.curve.divergences
        figures = [
            PolicyFigure("loss level above its best", detector.above, facts.curve.limits.diverged_mads, "scatters"),
            PolicyFigure("steps in a row so far above", detector.steps, table.past_steps, acts="at"),
            PolicyFigure(f"rise of the loss over {table.steps} steps", detector.rise, 1.0, "scatters"),
        ]
        otherwise = f"multiplies the rest of the learning-rate schedule by {table.factor:g} if all are above"
        return assess(figures, self._wanted(facts, memory), otherwise)


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
        looks = memory.observe("bad", float(not facts.curve.is_finite), wanted)
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
