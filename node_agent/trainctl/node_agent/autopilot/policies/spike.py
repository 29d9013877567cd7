"""Goes back before a spike of loss and gradient norm that doesn't come back, and skips the samples that led to it.

Chowdhery et al. 2022 (PaLM, section 5.1) restarted about 100 steps before a spike and skipped 200 to 500 batches.
"""

from collections.abc import Sequence

from trainctl.node_agent.autopilot.policy import (
    Advice,
    Assessment,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
)
from trainctl.protocol.analysis.spikes import Spike as Found
from trainctl.protocol.analysis.spikes import SpikeDetector
from trainctl.protocol.config.policies import SpikeTable
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import PolicyFigure, StepCommitted, verbs


class Spike(Policy):
    """A few times a run at most: a run that spikes again and again needs a person."""

    name = "spike"
    is_about_curve = True

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | Advice | None:
        if not isinstance(facts.occasion, Stepped):
            return None
        table = facts.config.policy.spike
        found = _detector(table, memory).add(facts.step, facts.occasion.loss, facts.occasion.report.grad_norm)
        if found is None or not found.is_stuck:
            memory.forget("said")
            return None
        if memory.kept.get("times", 0.0) >= table.most_times:
            return None
        return _back(facts, memory, found)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table, detector = facts.config.policy.spike, _detector(facts.config.policy.spike, memory)
        found, last = detector.spike, facts.occasion if isinstance(facts.occasion, Stepped) else None
        loss, norm = detector.above(last.loss, last.report.grad_norm) if last is not None else (None, None)
        times = memory.kept.get("times", 0.0)
        figures = [
            PolicyFigure("loss above its trend", loss, table.mads, "scatters"),
            PolicyFigure("gradient norm above its trend", norm, table.mads, "scatters"),
            PolicyFigure("steps of the present spike", found.steps if found else 0, table.recover_steps),
            PolicyFigure(f"rollbacks in this run, at most {table.most_times}", times),
        ]
        if times >= table.most_times:
            return Assessment(tuple(figures), f"does nothing more: it has gone back {table.most_times} times")
        wanted = _back(facts, Memory(), found) if found is not None and found.is_stuck else None
        return assess(figures, wanted, f"goes back before a spike that lasts more than {table.recover_steps} steps")

    def replay(self, config: RunFile, memory: Memory, steps: Sequence[StepCommitted]) -> None:
        _detector(config.policy.spike, memory).replay(steps)


def _detector(table: SpikeTable, memory: Memory) -> SpikeDetector:
    found: SpikeDetector | None = memory.evidence.get("detector")
    if found is None:
        found = memory.evidence["detector"] = SpikeDetector(table.mads, table.steps, table.recover_steps)
    return found


def _advise_once(memory: Memory, reason: str) -> Advice | None:
    was_said = memory.last("said")
    memory.observe("said", 1.0, 1)
    return None if was_said else Advice(reason)


def _back(facts: RunFacts, memory: Memory, found: Found) -> Proposal | Advice | None:
    """To a checkpoint far enough before the spike. What is skipped reaches over its first steps."""
    table, keep = facts.config.policy.spike, facts.config.checkpoint
    kept = facts.durable.kept_for_sure(keep.keep_last, keep.keep_every)
    latest = min(found.first - 1, facts.step - table.least_back)
    height = (
        f"loss {found.loss:.4g} where {found.expected:.4g} was expected, for {found.steps} steps from {found.first}"
    )
    step = max((at for at in kept if at <= latest), default=None)
    if step is None:
        why = f"no checkpoint up to step {max(latest, 0)} is kept; raise checkpoint.keep_last"
        return _advise_once(memory, f"{height}, but {why}")
    if table.skip_batches and found.first - step > (most := max(table.skip_batches, table.least_back)):
        why = f"the newest checkpoint to go back to, of step {step}, is more than {most} steps before it"
        return _advise_once(memory, f"{height}, but {why}; write checkpoints more often: lower checkpoint.every_steps")
    skips = max(table.skip_batches, found.first - step + table.steps) if table.skip_batches else 0
    args = verbs.Rollback(step=step, skip_batches=skips)
    times = {"times": memory.kept.get("times", 0.0) + 1}
    return Proposal("rollback", args, height, severity="error", remember=times, is_urgent=True)
