"""Checkpoints in the background: the copy of the state, what the agent gets of a write, the lead's word before it."""

import threading
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.node_agent.support.records import plan
from tests.trainer.support.passes import go_on, trained
from tests.trainer.support.synced_disk import SyncedDisk
from tests.trainer.support.written_checkpoints import loop_of
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.record.checkpoints import clear_pending, pending_ranks
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import RUN_SCHEMA, open_for_writing
from trainctl.trainer.backends.backend import Device, State
from trainctl.trainer.backends.memory import HostMemory
from trainctl.trainer.checkpoints import checkpointer
from trainctl.trainer.checkpoints.checkpointer import CHECKPOINT_FAILURES, Checkpointer, RecordSync
from trainctl.trainer.checkpoints.saver import Copied, HostCopy
from trainctl.trainer.step.progress import Progress

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


def test_a_copy_follows_updates_and_memory_that_moves(load_backend):
    backend = trained(load_backend, "torch", 1)
    copy, names = HostCopy(backend), [*backend.shapes]
    for change in (lambda p: p, lambda p: p.mul_(2), lambda p: p.clone() + 1):
        for parameter in backend._parameters:
            parameter.data = change(parameter.data)
        state = copy.take()
        for name, parameter in zip(names, backend._parameters, strict=True):
            np.testing.assert_array_equal(state.weights[name], parameter.detach().numpy())
        for slot, moments in state.slots.items():
            for name, moment in zip(names, backend._optimizer.moments(slot), strict=True):
                np.testing.assert_array_equal(moments[name], moment.numpy())


def test_a_copy_on_mlx_is_the_arrays_themselves_and_later_updates_leave_it_as_it_is(load_backend):
    backend = trained(load_backend, "mlx", 1)
    state = HostCopy(backend).take()
    for name, array in backend._moments["exp_avg"].items():
        assert np.shares_memory(state.slots["exp_avg"][name], np.asarray(array)), name
    before = {name: array.copy() for name, array in state.weights.items()}
    go_on(backend, 1, 3)
    for name, array in before.items():
        np.testing.assert_array_equal(state.weights[name], array)
        assert np.any(backend.copy_out("weights")[name] != array), name


AWAITED = msgspec.structs.replace(plan(7, m.Generation(1, 2)), kind="checkpoint", writers=(0,), recorded=False)


class Rank:
    """One with its record, beside that of an agent which is there or not."""

    def __init__(self, folder):
        self.paths, self.is_away = RunPaths(folder / "run-1"), False
        self.paths.directory.mkdir()
        self.agents = open_for_writing(self.paths.record, RUN_SCHEMA)
        self.metrics = MetricsWriter(self.paths.rank_record(0), "a")
        self.progress = Progress()
        self.record = RecordSync(self.paths, self.metrics, self.progress, lambda: self.is_away)

    def close(self):
        self.metrics.close()
        self.agents.close()

    def waiting(self, plan):
        """A thread that waits before a checkpoint."""
        made = threading.Thread(target=self.record.wait, args=(plan,), daemon=True)
        made.start()
        return made


@pytest.fixture
def rank(tmp_path):
    made = Rank(tmp_path)
    yield made
    made.close()


def test_a_checkpoint_waits_for_the_lead_s_word_on_its_own_plan(rank):
    waiting = rank.waiting(AWAITED)
    rank.record.plan(msgspec.structs.replace(AWAITED, seq=AWAITED.seq - 1, recorded=True))
    waiting.join(0.3)
    assert waiting.is_alive()
    rank.record.plan(msgspec.structs.replace(AWAITED, recorded=True))
    waiting.join(30)
    assert not waiting.is_alive()
    rank.waiting(AWAITED).join(30)  # it may come before the files are written


@pytest.mark.parametrize("why", ["away", "leaving", "generation"])
def test_a_checkpoint_waits_for_no_word_that_can_t_come(rank, why, monkeypatch):
    monkeypatch.setattr(checkpointer, "RECORD_SECONDS", 1e9)
    rank.progress.highest = AWAITED.generation
    waiting = rank.waiting(AWAITED)
    waiting.join(0.2)
    assert waiting.is_alive()
    match why:
        case "away":
            rank.is_away = True
        case "leaving":
            rank.progress.leaving = "ended by a signal"
        case "generation":
            rank.progress.highest = m.Generation(1, 3)
    waiting.join(HANG_SECONDS)
    assert not waiting.is_alive()


@pytest.mark.parametrize("plan", [None, msgspec.structs.replace(AWAITED, recorded=None)])
def test_a_lead_that_says_nothing_is_not_waited_for(rank, plan):
    waiting = rank.waiting(plan)
    waiting.join(30)
    assert not waiting.is_alive()


def test_the_records_of_this_node_are_on_its_disk_first(rank, tmp_path):
    rank.agents.execute("INSERT INTO meta VALUES ('key', 'value')")
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        rank.record.wait(None)
    synced = {moment.path for moment in disk.moments if moment.call == "sync"}
    assert {"run-1/record.db-wal", "run-1/rank-0.db-wal"} <= synced
