"""Metadata of a checkpoint: the recipe, the performance so far, the lineage and the environment."""

import platform

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine.facts import installed_version
from trainctl.protocol.messages import Generation, Report
from trainctl.protocol.record.checkpoint_metadata import CheckpointMetadata, Environment, Lineage, Performance
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.backends.base import Backend


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


def metadata(
    config: RunFile, lineage: tuple[str, int | None, Generation | None], done: Performance, where: Environment
) -> CheckpointMetadata:
    """`lineage`: the run, the step of the checkpoint that was loaded, and the generation that committed the step."""
    run, resumed_from, generation = lineage
    recipe = run_file.to_dict(config)
    for table in recipe.get("nodes", {}).values():
        table.pop("env", None)  # may hold secrets, and checkpoints are given away
    return CheckpointMetadata(
        recipe=recipe, performance=done, environment=where,
        lineage=Lineage(run=run, resumed_from=resumed_from, generation=generation),
    )  # fmt: skip
