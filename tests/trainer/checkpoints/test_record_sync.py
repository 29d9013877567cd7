"""The record is on a disk before a checkpoint has its name, by the lead's word where there is a lead."""

import threading

import msgspec
import pytest
from tests.node_agent.support.records import plan
from tests.trainer.support.synced_disk import SyncedDisk
from tests.waiting import HANG_SECONDS

from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import RUN_SCHEMA, open_for_writing
from trainctl.trainer.checkpoints import checkpointer
from trainctl.trainer.checkpoints.checkpointer import RecordSync
from trainctl.trainer.step.progress import Progress

PLAN = msgspec.structs.replace(plan(7, m.Generation(1, 2)), kind="checkpoint", writers=(0,), recorded=False)


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
    waiting = rank.waiting(PLAN)
    rank.record.plan(msgspec.structs.replace(PLAN, seq=PLAN.seq - 1, recorded=True))
    waiting.join(0.3)
    assert waiting.is_alive()
    rank.record.plan(msgspec.structs.replace(PLAN, recorded=True))
    waiting.join(30)
    assert not waiting.is_alive()
    rank.waiting(PLAN).join(30)  # it may come before the files are written


@pytest.mark.parametrize("why", ["away", "leaving", "generation"])
def test_a_checkpoint_waits_for_no_word_that_can_t_come(rank, why, monkeypatch):
    monkeypatch.setattr(checkpointer, "RECORD_SECONDS", 1e9)
    rank.progress.highest = PLAN.generation
    waiting = rank.waiting(PLAN)
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


@pytest.mark.parametrize("plan", [None, msgspec.structs.replace(PLAN, recorded=None)])
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
