"""Giving one rank's state to others: to those behind when a group is formed, to all when replicas have drifted apart.

Weights and the optimizer's slots travel one after another, as they are to the bit; then AdamW's count and the loss
scale.
"""

import functools
import math
from collections.abc import Mapping

import numpy as np

from trainctl.protocol.messages import Form, Generation
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.collective.group import Group
from trainctl.trainer.step.progress import LossScale, Progress


def level(group: Group, form: Form, rank: int, backend: Backend, scale: LossScale, progress: Progress) -> None:
    """Take part in giving the source's state to the ranks behind; one of those then stands at the form's step. Raises
    GroupError or AbandonedError; a rank left with part of a state is marked so in its progress."""
    takes = rank in form.behind
    for part in ("weights", *backend.slots):
        arrays = group.share(form.source, functools.partial(backend.copy_out, part))
        if takes and arrays is not None:
            with progress.exclusive(form.generation):
                progress.tear()
                backend.copy_in(part, arrays)
    updates, value, good_steps = group.share_numbers(form.source, (backend.updates, scale.value, scale.good_steps))
    if takes:
        with progress.exclusive(form.generation):
            backend.updates = int(updates)
            scale.value, scale.good_steps = value, int(good_steps)
            progress.take_over(form.step, form.cursor)


def take_lowest(group: Group, generation: Generation, backend: Backend, progress: Progress) -> float:
    """Take over the weights and slots of the group's lowest rank, which is at the same step. Returns the drift: the
    largest difference between a weight of this rank and the lowest's, over the root mean square of the lowest's. Raises
    as `level`; stopped half-way, the state is still one of this step, to rounding."""
    drift = 0.0
    for part in ("weights", *backend.slots):
        arrays = group.share(None, functools.partial(backend.copy_out, part))
        if arrays is None or group.is_source(None):
            continue
        if part == "weights":
            drift = _drift(backend, arrays)
        with progress.exclusive(generation):
            backend.copy_in(part, arrays)
    return drift


def _drift(backend: Backend, theirs: Mapping[str, Array]) -> float:
    own = backend.copy_of("weights")
    largest = max(float(np.abs(own[name] - theirs[name]).max(initial=0.0)) for name in own)
    squares = sum(float(np.sum(np.square(array, dtype=np.float64))) for array in theirs.values())
    count = sum(array.size for array in theirs.values())
    return largest / math.sqrt(squares / count) if squares else largest
