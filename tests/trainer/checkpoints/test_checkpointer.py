"""A rank's checkpoint plans in the background: what the agent gets of a write that fails in an unexpected way."""

import threading
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.written_checkpoints import loop_of

from trainctl.protocol import messages as m
from trainctl.protocol.record.copy_mark import clear_pending, pending_ranks
from trainctl.trainer.backends.backend import Device, State
from trainctl.trainer.backends.memory import HostMemory
from trainctl.trainer.checkpoints.checkpointer import CHECKPOINT_FAILURES, Checkpointer
from trainctl.trainer.checkpoints.saver import Copied, HostCopy

LOOP = loop_of(4)
PLAN = m.StepPlan(
    run="r", generation=m.Generation(1, 1), seq=5, plan_version=1, step=4, kind="checkpoint", cursor=4, global_batch=0,
    work=(), learning_rate=0.0, divisor=1.0, writers=(0,),
)  # fmt: skip


class CountedFrees(Device):
    def __init__(self):
        super().__init__("full", HostMemory(None))
        self.frees = 0

    def free_cache(self):
        self.frees += 1


class FullDevice:
    """A backend whose first copy of a moment finds no memory."""

    slots, shapes, updates = ("exp_avg",), {"w": (4,)}, 4

    def __init__(self):
        self.errors, self.device = [RuntimeError("CUDA out of memory. Tried to allocate 2 GiB")], CountedFrees()

    def copy_out(self, slot, arrays):
        if slot == "exp_avg" and self.errors:
            raise self.errors.pop()
        arrays["w"][...] = 3.0
        return arrays

    def export_state(self, copy):
        slots = {slot: copy(slot) for slot in self.slots}
        return State(copy("weights"), slots, self.updates)

    def is_out_of_memory(self, error):
        return "out of memory" in str(error)


def test_a_device_without_room_costs_one_copy_of_the_state_and_no_rank():
    backend: Any = FullDevice()
    copy = HostCopy(backend)
    with pytest.raises(CHECKPOINT_FAILURES, match="out of memory for the copy of the state: CUDA out of memory"):
        copy.take()
    assert backend.device.frees == 1
    assert copy.take().slots["exp_avg"]["w"].tolist() == [3.0] * 4
    backend.errors = [RuntimeError("an illegal memory access was encountered")]
    with pytest.raises(RuntimeError, match="illegal"):
        copy.take()


class FaultySaver:
    """Its first write ends by an error that no one has foreseen."""

    def __init__(self):
        self.errors: list[Exception] = [ValueError("no such frame")]
        self.version, self.written = 0, list[int]()

    def copy(self):
        return Copied(LOOP, State({"w": np.zeros(4, np.float32)}, {}, 4), None, None, 0.0, self.version)

    def write_copy(self, copied, meter, before_name):
        if self.errors:
            raise self.errors.pop()
        self.written.append(copied.version)
        return m.CheckpointInfo("p", copied.loop.step, 1, 0.0)


def test_an_unforeseen_error_costs_the_checkpoint_and_neither_the_rank_nor_the_next_one():
    said: list[m.FromTrainer] = []
    saver: Any = FaultySaver()
    checkpointer = Checkpointer("r", 0, saver, said.append)
    for _ in range(2):
        checkpointer.copy(PLAN)
        checkpointer.begin()
    checkpointer.wait()
    first, second = said
    assert isinstance(first, m.Checkpointed)
    assert (first.checkpoint, first.problem) == (None, "checkpoint failed: no such frame")
    assert isinstance(second, m.Checkpointed)
    assert second.checkpoint is not None
    assert checkpointer.state() == second


def test_the_last_state_is_written_once_and_again_if_its_step_was_done_again():
    said: list[m.FromTrainer] = []
    saver: Any = FaultySaver()
    saver.errors.clear()
    checkpointer = Checkpointer("r", 0, saver, said.append)
    for version in (7, 7, 9):  # of step 4 each time
        saver.version = version
        checkpointer.write_last(4)
    checkpointer.wait()
    assert saver.written == [7, 9]


def test_the_first_writer_marks_what_the_agent_copies(tmp_path):
    saver: Any = FaultySaver()
    for rank, marks in ((1, {}), (0, {4: 0})):
        checkpointer = Checkpointer("r", rank, saver, lambda _: None, tmp_path)
        checkpointer.copy(PLAN)
        checkpointer.begin()
        checkpointer.wait()
        assert pending_ranks(tmp_path) == marks
    agent = threading.Timer(0.2, clear_pending, (tmp_path, 4))
    agent.start()
    checkpointer.wait_for_copy()
    assert pending_ranks(tmp_path) == {}, "a leaving trainer waits for the copy"
    agent.join()
