"""The best checkpoint: of those evaluated at their own step, the one with the lowest held-out loss."""

import math
from collections.abc import Collection, Sequence
from pathlib import Path

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.checkpoints import listed, read_manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.reader import RecordReader
from trainctl.protocol.record.rollups import Evaluation


def best_step(steps: Collection[int], evaluations: Sequence[Evaluation]) -> int | None:
    """Of the steps, the one whose held-out loss is lowest; the newest of equals; None if none was evaluated."""
    losses = {one.step: one.loss for one in evaluations if one.step in steps and math.isfinite(one.loss)}
    return min(losses, key=lambda step: (losses[step], -step), default=None)


def best_checkpoint(paths: RunPaths) -> Path | None:
    """The best complete one as this node's copy of the record has it now; None without an evaluation or a record."""
    found = dict[int, Path]()
    for folder in listed(paths.checkpoints):
        try:
            found[read_manifest(folder).step] = folder
        except InvalidInputError:
            continue
    try:
        with RecordReader(paths) as record:
            step = best_step(found, record.evaluations())
    except InvalidInputError:
        return None
    return found[step] if step is not None else None
