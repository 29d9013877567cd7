"""Metadata of a checkpoint: the recipe, the performance so far, the lineage and the environment."""

import platform

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.messages import Report
from trainctl.protocol.messages.events import RunBranched
from trainctl.protocol.record.checkpoint_metadata import (
    CheckpointMetadata,
    Environment,
    Lineage,
    ParentCheckpoint,
    Performance,
)
from trainctl.protocol.record.checkpoints import Manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.backends.backend import Backend

FIRST_EVENTS = 50
"""Number of a record's first events among which a branch's own is."""


def environment(node: str, backend: Backend) -> Environment:
    library = f"{backend.name} {installed_version(backend.name) or ''}".strip()
    system = f"{platform.system()} {platform.machine()}"
    program = installed_version("trainctl") or ""
    return Environment(
        node=node, program=program, python=platform.python_version(), library=library, device=backend.device,
        system=system,
    )  # fmt: skip


def performance(step: int, report: Report | None, newest: Evaluation | None) -> Performance:
    """`report`: of the newest step, which counts only if it is `step`'s."""
    made = report if report is not None and report.step == step and report.weight > 0 else None
    return Performance(
        loss=made.loss_sum / made.weight if made else None,
        step_seconds=made.step_seconds if made else None,
        tokens_per_second=made.tokens / made.step_seconds if made and made.step_seconds > 0 else None,
        eval_loss=newest.loss if newest else None,
        eval_step=newest.step if newest else None,
    )


def newest_evaluation(paths: RunPaths, step: int) -> Evaluation | None:
    """The newest one up to `step` in this node's copy of the record; None without a record or an evaluation."""
    try:
        with RecordReader(paths) as record:
            found = [one for one in record.evaluations() if one.step <= step]
    except InvalidInputError:
        return None
    return max(found, key=lambda one: one.step, default=None)


def recorded_parent(paths: RunPaths, run: str) -> ParentCheckpoint | None:
    """What the run branched off, by this node's copy of its record; None if it is no branch, or without a record."""
    try:
        with RecordReader(paths) as record:
            events, _ = record.events(0, FIRST_EVENTS)
    except InvalidInputError:
        return None
    found = (event.data for event in events if isinstance(event.data, RunBranched) and event.data.branch == run)
    return next((ParentCheckpoint(data.parent, data.step) for data in found), None)


def parent_by(manifest: Manifest, run: str) -> ParentCheckpoint | None:
    """What the run branched off, by the checkpoint that it continues from: another run's, or one of its own."""
    if manifest.run != run:
        return ParentCheckpoint(manifest.run, manifest.step)
    return manifest.metadata.lineage.parent if manifest.metadata is not None else None


def metadata(config: RunFile, lineage: Lineage, done: Performance, where: Environment) -> CheckpointMetadata:
    """All of it, without what a recipe must not give away."""
    recipe = run_file.to_dict(config)
    for table in recipe.get("nodes", {}).values():
        table.pop("env", None)  # may hold secrets, and checkpoints are given away
    return CheckpointMetadata(recipe=recipe, performance=done, environment=where, lineage=lineage)
