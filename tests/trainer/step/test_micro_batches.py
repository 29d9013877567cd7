"""Tests of what a lack of memory leaves of the limits of micro-batches."""

import numpy as np
import pytest

from trainctl.protocol import messages as m
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.step.micro_batches import FittingLimits, MicroBatchQueue

PLAN = m.StepPlan(
    run="r",
    generation=m.Generation(1, 1),
    seq=1,
    kind="train",
    step=1,
    plan_version=1,
    cursor=0,
    global_batch=10,
    work=(),
    learning_rate=0.0,
    divisor=1.0,
)
LENGTHS = np.array([400, 400, 100, 100, 100, 100, 100, 100, 100, 100])


def sizes(fitting, room):
    """Return the micro-batches that were done on a device with room for so many tokens, and the largest to expect."""
    queue, done = MicroBatchQueue(fitting, PLAN, m.RankWork(0, (m.Range(0, 10),), 10), lambda at: LENGTHS[at]), []
    while queue.pieces:
        tokens = len(queue.pieces[0]) * int(LENGTHS[queue.pieces[0]].max())
        if tokens > room:
            queue.halve(DeviceMemoryError("no room"))
        else:
            done.append(len(queue.pieces[0]))
            queue.done()
    return done, queue.micro_batch


@pytest.mark.parametrize(
    ("tokens", "room", "expected"),
    [
        (800, 800, ([2, 8], 10)),
        (800, 400, ([1, 1, 4, 4], 10)),
        (800, 300, None),
        (0, 800, ([2, 2, 2, 2, 2], 2)),
    ],
)
def test_a_piece_that_tokens_limited_halves_their_limit_and_not_that_of_shorter_samples(tokens, room, expected):
    fitting = FittingLimits(tokens)
    if expected is None:
        with pytest.raises(Exception, match="out of memory with a micro-batch of one sample"):
            sizes(fitting, room)
        return
    assert sizes(fitting, room) == expected
    assert sizes(fitting, room) == expected, "the next step knows"
