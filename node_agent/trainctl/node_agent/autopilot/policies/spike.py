"""Goes back before a spike of loss and gradient norm that doesn't come back, and skips the samples that led to it.

Chowdhery et al. 2022 (PaLM, section 5.1) restarted about 100 steps before a spike and skipped 200 to 500 batches.
"""

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
)
from trainctl.protocol.analysis import spikes
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


def _is_due(spike: spikes.Spike) -> bool:
    """A loss that jumps without its gradient norm may have other data: it is shown, and raises an alert."""
    return spike.is_stuck and spike.norm_rose


def _advise_once(memory: Memory, reason: str) -> Finding | None:
    was_said = memory.last("said")
    memory.observe("said", 1.0, 1)
    return None if was_said else Finding("spike", reason, "warning")


def _back(facts: RunFacts, memory: Memory, spike: spikes.Spike) -> Proposal | Finding | None:
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
