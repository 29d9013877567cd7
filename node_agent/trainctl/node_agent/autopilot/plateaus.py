"""What policies of the held-out loss keep: a plateau detector's state as numbers."""

from collections.abc import Mapping

from trainctl.protocol import messages as m
from trainctl.protocol.analysis.loss_trends import Plateau, PlateauDetector


def detector(improvement: float, patience: int, kept: Mapping[str, float]) -> PlateauDetector:
    """A detector that continues from what was kept, if anything was. `improvement` is relative, `patience` a number
    of evaluations."""
    made = PlateauDetector(improvement, patience)
    if "best" in kept:
        numbers = (int(kept[name]) for name in ("best_step", "evaluations", "last_step"))
        made.restore(Plateau(kept["best"], *numbers))
    return made


def kept(found: PlateauDetector) -> dict[str, float]:
    """What `detector` continues from."""
    state = found.state
    return {} if state is None else {name: float(value) for name, value in state._asdict().items()}


def start_over(found: PlateauDetector, evaluations: int = 0) -> None:
    """Count evaluations from 0 again after so many; the best loss stays."""
    state = found.state
    found.restore(None if state is None else state._replace(evaluations=-evaluations))


def figures(found: PlateauDetector, patience: int) -> list[m.PolicyFigure]:
    """What has been counted, and the best loss."""
    state = found.state
    counted = max(state.evaluations, 0) if state is not None else None
    return [
        m.PolicyFigure("evaluations without improvement", counted, patience, acts="at"),
        m.PolicyFigure("best held-out loss", state.best if state is not None else None),
    ]


def in_words(found: PlateauDetector) -> str:
    """`no improvement over 2.31 of step 400 in 5 evaluations`."""
    state = found.state
    assert state is not None, "a plateau has evaluations"
    return f"no improvement over {state.best:.4g} of step {state.best_step} in {state.evaluations} evaluations"
