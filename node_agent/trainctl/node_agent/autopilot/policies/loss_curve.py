"""Policies of the loss curve: what to do about spikes, a loss that keeps rising, and steps that aren't finite.

After a spike of loss and gradient norm that doesn't come back, the run goes back and skips the samples that led to it:
Chowdhery et al. 2022 (PaLM, section 5.1) restarted about 100 steps before a spike and skipped 200 to 500 batches.
"""

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
from trainctl.protocol.analysis.detectors import Spike as SpikeFound
from trainctl.protocol.messages import Finding, PolicyFigure, verbs


class Spike(Policy):
    """Acts a few times a run at most: a run that spikes again and again needs a person."""

    name = "spike"

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | Finding | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        spike = facts.curve.spike
        if spike is None or not _is_due(spike):
            memory.forget("said")
            return None
        if memory.kept.get("times", 0.0) >= facts.config.policy.spike.max_times:
            return None
        return _back(facts, memory, spike)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, mads = facts.config.policy.spike, facts.curve.limits.spike_mads
        spike, last = facts.curve.spike, facts.occasion if isinstance(facts.occasion, Stepped) else None
        loss, norm = facts.curve.spikes.above(last.loss, last.report.grad_norm) if last is not None else (None, None)
        times = memory.kept.get("times", 0.0)
        figures = [
            PolicyFigure("loss above its trend", loss, mads, "scatters"),
            PolicyFigure("gradient norm above its trend", norm, mads, "scatters"),
            PolicyFigure("steps of the present spike", spike.steps if spike else 0, table.recover_steps),
            PolicyFigure(f"rollbacks in this run, at most {table.max_times}", times),
        ]
        if times >= table.max_times:
            return Assessment(tuple(figures), f"does nothing more: it has gone back {table.max_times} times")
        wanted = _back(facts, Memory(), spike) if spike is not None and _is_due(spike) else None
        return assess(figures, wanted, f"goes back before a spike that lasts more than {table.recover_steps} steps")


def _is_due(spike: SpikeFound) -> bool:
    """A loss that jumps without its gradient norm may have other data: it is shown, and raises an alert."""
    return spike.is_stuck and spike.norm_rose


def _advise_once(memory: Memory, reason: str) -> Finding | None:
    was_said = memory.last("said")
    memory.observe("said", 1.0, 1)
    return None if was_said else Finding("spike", reason, "warning")


def _back(facts: RunFacts, memory: Memory, spike: SpikeFound) -> Proposal | Finding | None:
    """Propose a rollback to a checkpoint far enough before the spike. What is skipped reaches over its first steps."""
    table, keep = facts.config.policy.spike, facts.config.checkpoint
    kept = facts.durable.kept_for_sure(keep.keep_last, keep.keep_every)
    latest = min(spike.first - 1, facts.step - table.min_back)
    height = (
        f"loss {spike.loss:.4g} where {spike.expected:.4g} was expected, for {spike.steps} steps from {spike.first}"
    )
    step = max((at for at in kept if at <= latest), default=None)
    if step is None:
        why = f"no checkpoint up to step {max(latest, 0)} is kept; raise checkpoint.keep_last"
        return _advise_once(memory, f"{height}, but {why}")
    if table.skip_batches and spike.first - step > (most := max(table.skip_batches, table.min_back)):
        why = f"the newest checkpoint to go back to, of step {step}, is more than {most} steps before it"
        return _advise_once(memory, f"{height}, but {why}; write checkpoints more often: lower checkpoint.every_steps")
    skips = max(table.skip_batches, spike.first - step + facts.curve.limits.spike_steps) if table.skip_batches else 0
    args = verbs.Rollback(step=step, skip_batches=skips)
    times = {"times": memory.kept.get("times", 0.0) + 1}
    return Proposal("rollback", args, height, severity="error", remember=times, is_urgent=True)


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
