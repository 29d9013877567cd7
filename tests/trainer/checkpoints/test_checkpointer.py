"""A rank's checkpoint plans in the background: what the agent gets of a write that fails in an unexpected way."""

from typing import Any

import numpy as np

from trainctl.protocol import messages as m
from trainctl.trainer.backends.base import State
from trainctl.trainer.checkpoints import files
from trainctl.trainer.checkpoints.checkpointer import Checkpointer
from trainctl.trainer.checkpoints.saver import Copied

LOOP = files.LoopState(
    step=4, cursor=4, updates=4, loss_scale=1.0, loss_scale_good_steps=0, seed=0, samples=9, layout_digest="l",
    data_digest="d",
)  # fmt: skip
PLAN = m.StepPlan(
    run="r", generation=m.Generation(1, 1), seq=5, plan_version=1, step=4, kind="checkpoint", cursor=4, global_batch=0,
    work=(), learning_rate=0.0, divisor=1.0, writers=(0,),
)  # fmt: skip


class FaultySaver:
    """Its first write ends by an error that no one has foreseen."""

    def __init__(self) -> None:
        self.errors: list[Exception] = [ValueError("no such frame")]

    def copy(self) -> Copied:
        return Copied(LOOP, State({"w": np.zeros(4, np.float32)}, {}, 4), None, None, 0.0)

    def write_copy(self, copied: Copied, meter: Any) -> m.CheckpointInfo:
        if self.errors:
            raise self.errors.pop()
        return m.CheckpointInfo("p", copied.loop.step, 1, 0.0)


def test_an_unforeseen_error_costs_the_checkpoint_and_neither_the_rank_nor_the_next_one() -> None:
    said: list[m.FromTrainer] = []
    saver: Any = FaultySaver()
    checkpointer = Checkpointer("r", 0, saver, said.append)
    for _ in range(2):
        checkpointer.copy(PLAN)
        checkpointer.begin()
    checkpointer.close()
    first, second = said
    assert isinstance(first, m.Checkpointed)
    assert (first.checkpoint, first.problem) == (None, "checkpoint failed: no such frame")
    assert isinstance(second, m.Checkpointed)
    assert second.checkpoint is not None
    assert checkpointer.state() == second
