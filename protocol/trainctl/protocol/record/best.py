"""The best checkpoint: the one with the lowest held-out loss.

A checkpoint that is due while another is being written is of a later step than the evaluation. So an evaluation counts
for the first checkpoint at or after its step, and a checkpoint by the newest of its evaluations. Where the best one
stays, none becomes the best because another was removed: what that one was judged by was no better."""

import bisect
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
    ascending, losses = sorted(steps), dict[int, float]()
    for one in sorted(evaluations, key=lambda one: one.step):
        if (at := bisect.bisect_left(ascending, one.step)) < len(ascending):
            losses[ascending[at]] = one.loss
    finite = [step for step, loss in losses.items() if math.isfinite(loss)]
    return min(finite, key=lambda step: (losses[step], -step), default=None)


def best_checkpoint(paths: RunPaths, before: int | None = None) -> Path | None:
    """The best complete one, of those before step `before`, as this node's copy of the record has it now; None without
    an evaluation or a record."""
    found = dict[int, Path]()
    for folder in listed(paths.checkpoints):
        try:
            step = read_manifest(folder).step
        except InvalidInputError:
            continue
        if before is None or step < before:
            found[step] = folder
    try:
        with RecordReader(paths) as record:
            best = best_step(found, record.evaluations())
    except InvalidInputError:
        return None
    return found[best] if best is not None else None
