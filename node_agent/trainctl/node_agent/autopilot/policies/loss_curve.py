"""Policies of the loss curve: spikes, a loss that keeps rising, steps that aren't finite, and plateaus.

After a spike of loss and gradient norm that doesn't come back, the run goes back and skips the samples that led to it:
Chowdhery et al. 2022 (PaLM, section 5.1) restarted about 100 steps before a spike and skipped 200 to 500 batches.

When the held-out loss has stopped improving, the learning rate is lowered, or the run stopped. The lower rate is in the
settings of the next step, like every change of the schedule: a run that goes back to a checkpoint takes both up as they
were there, the rate and the evaluations that were counted.
"""

from collections.abc import Mapping, Sequence
from math import inf

from trainctl.node_agent.autopilot.policy import (
    Assessment,
    HeldOutLoss,
    Memory,
    Policy,
    Proposal,
    RunFacts,
    Stepped,
    assess,
    mode_of,
)
from trainctl.node_agent.planning.plans import rate
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.analysis.detectors import Plateau as PlateauState
from trainctl.protocol.analysis.detectors import PlateauDetector
from trainctl.protocol.analysis.detectors import Spike as SpikeFound
from trainctl.protocol.config.policies import PlateauTable
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import Finding, PolicyFigure, verbs
from trainctl.protocol.messages.events import LearningRateChanged


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


def _plateau_detector(improvement: float, patience: int, kept: Mapping[str, float]) -> PlateauDetector:
    """Return a detector that continues from what was kept, if anything was. `improvement` is relative, `patience` a
    number of evaluations."""
    detector = PlateauDetector(improvement, patience)
    if "best" in kept:
        numbers = (int(kept[name]) for name in ("best_step", "evaluations", "last_step"))
        detector.restore(PlateauState(kept["best"], *numbers))
    return detector


def _kept_state(found: PlateauDetector) -> dict[str, float]:
    state = found.state
    return {} if state is None else {name: float(value) for name, value in state._asdict().items()}


def _start_over(found: PlateauDetector, evaluations: int = 0) -> None:
    """Count evaluations from 0 again after so many; the best loss stays."""
    state = found.state
    found.restore(None if state is None else state._replace(evaluations=-evaluations))


def _plateau_figures(found: PlateauDetector, patience: int) -> list[PolicyFigure]:
    state = found.state
    counted = max(state.evaluations, 0) if state is not None else None
    return [
        PolicyFigure("evaluations without improvement", counted, patience, acts="at"),
        PolicyFigure("best held-out loss", state.best if state is not None else None),
    ]


def _in_words(found: PlateauDetector) -> str:
    """`no improvement over 2.31 of step 400 in 5 evaluations`."""
    state = found.state
    assert state is not None, "a plateau has evaluations"
    return f"no improvement over {state.best:.4g} of step {state.best_step} in {state.evaluations} evaluations"


class Plateau(Policy):
    """Scales the rest of the learning-rate schedule down.

    After each cut some evaluations don't count, so that the lower rate can have an effect.
    """

    name = "plateau"
    occasions = HeldOutLoss

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, HeldOutLoss) or facts.step >= facts.config.run.steps:
            return None
        table = facts.config.policy.plateau
        found = _plateau_detector(table.improvement, table.patience, memory.kept)
        proposal = None
        if found.add(facts.occasion.step, facts.occasion.loss) is not None:
            proposal = _cut(facts, _in_words(found))
            _start_over(found, table.cooldown)
        memory.kept |= _kept_state(found)
        return proposal

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table = facts.config.policy.plateau
        found = _plateau_detector(table.improvement, table.patience, memory.kept)
        why = f"multiplies the rest of the learning-rate schedule by {table.factor:g} after {table.patience} of them"
        return Assessment(tuple(_plateau_figures(found, table.patience)), why)

    def gone_back(
        self, config: RunFile, kept: Mapping[str, float], evaluations: Sequence[tuple[int, float]]
    ) -> Mapping[str, float]:
        return _kept_state(_counted(config.policy.plateau, evaluations)) if kept else kept


def _counted(table: PlateauTable, evaluations: Sequence[tuple[int, float]]) -> PlateauDetector:
    found = PlateauDetector(table.improvement, table.patience)
    for step, loss in evaluations:
        if found.add(step, loss) is not None:
            _start_over(found, table.cooldown)
    return found


def _cut(facts: RunFacts, reason: str) -> Proposal | None:
    """The rest of the schedule times the factor, from the next step on; nothing below the least rate."""
    table, settings, config = facts.config.policy.plateau, facts.durable.settings, facts.config
    step = min(facts.step + 1, config.run.steps)
    lower = settings.lr.scaled(table.factor)
    before, after = (rate(rule, config.optimizer, config.run.steps, step) for rule in (settings.lr, lower))
    if after < table.min_rate or after == before:
        return None
    change = LearningRateChanged(before, after, "scale", settings.lr.kind == "constant")
    edit = Edit(settings.edited(lr=lower), change)
    return Proposal("set-lr", verbs.SetLr(value=after), reason, edit=edit, severity="warning")


_STOPPED = "stopped"
"""Key of what it keeps: it has ended the run."""


class EarlyStop(Policy):
    """Stops a run with a checkpoint.

    Who resumes a run that it has ended wants more of it: then it counts evaluations from 0 again.
    """

    name = "early-stop"
    occasions = HeldOutLoss

    def propose(self, facts: RunFacts, memory: Memory) -> Proposal | None:
        if not isinstance(facts.occasion, HeldOutLoss) or facts.step >= facts.config.run.steps:
            return None
        table = facts.config.policy.early_stop
        found = _plateau_detector(table.improvement, table.patience, memory.kept)
        is_reached = found.add(facts.occasion.step, facts.occasion.loss) is not None
        memory.kept |= _kept_state(found)
        if not is_reached:
            return None
        reason, once = _in_words(found), {_STOPPED: 1.0}
        return Proposal("stop", verbs.Stop(), reason, severity="warning", remember=once, is_urgent=True)

    def sees(self, facts: RunFacts, memory: Memory) -> Assessment:
        table = facts.config.policy.early_stop
        found = _plateau_detector(table.improvement, table.patience, memory.kept)
        why = f"writes a checkpoint and stops the run after {table.patience} of them"
        return Assessment(tuple(_plateau_figures(found, table.patience)), why)

    def gone_back(
        self, config: RunFile, kept: Mapping[str, float], evaluations: Sequence[tuple[int, float]]
    ) -> Mapping[str, float]:
        if not kept:
            return kept
        table = config.policy.early_stop
        found = _plateau_detector(table.improvement, table.patience, {})
        found.replay(evaluations)
        if _STOPPED in kept:
            _start_over(found)
        return _kept_state(found)
