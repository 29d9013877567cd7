"""One of two runs that are compared, read from its directory."""

from dataclasses import dataclass
from typing import Final

from trainctl.protocol.analysis.diagnosis.diagnosis_facts import config_of, facts_of_record
from trainctl.protocol.messages import Event, RankStep, RankView, RunView
from trainctl.protocol.messages.events import LearningRateChanged
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.whole_run import CurvePoint, WholeRunReader
from trainctl.tui.report import recipe
from trainctl.tui.report.interventions import kind_of
from trainctl.tui.report.run_facts import DataFacts, named, parts_of
from trainctl.tui.text import run_lines

VERSIONS: Final = {"program": "trainctl", "library": "library", "python": "Python", "system": "system"}
"""Fields of a checkpoint's environment, as a comparison calls them."""


EVENTS: Final = ("learning rate", "rollback")
"""Changes of the plan that are in force at one step, or whose value before isn't known."""


@dataclass(frozen=True, order=True)
class PlanChange:
    """A setting of the plan, from a step on."""

    step: int
    what: str  # such as shares
    value: str


@dataclass(frozen=True)
class RunSide:
    """One of the two runs that are compared."""

    run: str
    recipe: dict[str, str]  # fields of the run file
    data: DataFacts
    versions: dict[str, str]  # by what it is of, such as `library on studio`; empty: not recorded
    plans: tuple[PlanChange, ...]  # by step
    curve: tuple[CurvePoint, ...]  # by step


def read_side(paths: RunPaths) -> RunSide:
    """Return one side of a comparison. Raises InvalidInputError if the record can't be read."""
    with WholeRunReader(paths) as reader:
        view = facts_of_record(reader, config_of(paths)).view
        return RunSide(
            reader.run,
            recipe.read_recipe(paths)[0],
            recipe.data_of(paths),
            _versions(paths, view),
            tuple(sorted([*_plans(reader), *_commands(reader.all_events())])),
            reader.curve(),
        )


def _versions(paths: RunPaths, view: RunView | None) -> dict[str, str]:
    """Return the versions by the checkpoints; backend, device, precision and all libraries by the run's ranks."""
    found = {
        f"{name} on {environment.node}": getattr(environment, field)
        for environment in recipe.environments(paths)
        for field, name in VERSIONS.items()
    }
    ranks = view.ranks if view is not None else ()
    for name, rank in named([(rank.node, rank) for rank in ranks]).items():
        found |= {f"backend of {name}": rank.backend or "", f"device of {name}": rank.device or ""}
        resolved = run_lines.compute_settings(rank.compute) if rank.compute is not None else {}
        found |= {f"{key} of {name}": value for key, value in resolved.items()}
        found = _libraries(rank) | found
    return {name: value for name, value in found.items() if value}


def _libraries(rank: RankView) -> dict[str, str]:
    """Versions on its node. Python's and the backend's have the names of those in checkpoints, which a run may lack."""
    found = run_lines.library_versions(rank.compute) if rank.compute is not None else {}
    python, own = found.pop("python", ""), found.pop(rank.backend or "", "")
    named = {"Python": python, "library": own and f"{rank.backend} {own}", **found}
    return {f"{name} on {rank.node}": version for name, version in named.items() if version}


def _plans(reader: WholeRunReader) -> list[PlanChange]:
    """Return where shares, micro-batches or the global batch change."""
    made: list[PlanChange] = []
    before: dict[str, str] = {}
    for span in reader.plan_spans():
        now = _plan(parts_of(reader, span))
        made += [PlanChange(span.first, what, value) for what, value in now.items() if before.get(what) != value]
        before = now
    return made


def _plan(parts: dict[str, RankStep]) -> dict[str, str]:
    return {
        "shares": ", ".join(f"{name} {part.samples}" for name, part in parts.items()),
        "micro-batches": ", ".join(f"{name} {part.micro_batch}" for name, part in parts.items()),
        "global batch": str(sum(part.samples for part in parts.values())),
    }


def _commands(events: tuple[Event, ...]) -> list[PlanChange]:
    """Changes of the learning rate and returns to a checkpoint, which the ranks' parts don't show."""
    made = []
    for event in events:
        if event.step is None or kind_of(event) is None:
            continue
        if isinstance(event.data, LearningRateChanged):
            made.append(PlanChange(event.step, "learning rate", f"{event.data.after:g} ({event.data.schedule})"))
        elif kind_of(event) == "rollback":
            made.append(PlanChange(event.step, "rollback", event.text))
    return made
