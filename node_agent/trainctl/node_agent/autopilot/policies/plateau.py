"""Lowers the learning rate, or stops the run, when the held-out loss has stopped improving.

The lower rate is in the settings of the next step, like every change of the schedule: a run that goes back to a
checkpoint takes both up as they were there, the rate and the evaluations that were counted.
"""

from collections.abc import Mapping, Sequence

from trainctl.node_agent.autopilot.policy import Assessment, HeldOutLoss, Memory, Policy, Proposal, RunFacts
from trainctl.node_agent.planning.plans import rate
from trainctl.node_agent.planning.share_edits import Edit
from trainctl.protocol.analysis.detectors import Plateau as PlateauState
from trainctl.protocol.analysis.detectors import PlateauDetector
from trainctl.protocol.config.policies import PlateauTable
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import PolicyFigure, verbs
from trainctl.protocol.messages.events import LearningRateChanged


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
