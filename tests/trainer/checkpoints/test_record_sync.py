"""What is on a disk before a checkpoint has its name: the record, by the lead's word where there is a lead."""

import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.node_agent.support.records import plan
from tests.trainer.support.synced_disk import SyncedDisk

from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rank_record import MetricsWriter
from trainctl.protocol.record.schema import RUN_SCHEMA, open_for_writing
from trainctl.trainer.checkpoints.record_sync import RecordSync

PLAN = msgspec.structs.replace(plan(7, m.Generation(1, 2)), kind="checkpoint", writers=(0,), recorded=False)


class Rank:
    """One with its record, beside that of an agent which is there or not."""

    def __init__(self, folder: Path) -> None:
        self.paths, self.is_away = RunPaths(folder / "run-1"), False
        self.paths.directory.mkdir()
        self.agents = open_for_writing(self.paths.record, RUN_SCHEMA)
        self.metrics = MetricsWriter(self.paths.rank_record(0), "a")
        self.record = RecordSync(self.paths, self.metrics, lambda: self.is_away)

    def close(self) -> None:
        self.metrics.close()
        self.agents.close()

    def waiting(self, plan: m.StepPlan | None) -> threading.Thread:
        """A thread that waits before a checkpoint."""
        made = threading.Thread(target=self.record.wait, args=(plan,))
        made.start()
        return made


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(tmp_path)
    yield made
    made.close()


def test_a_checkpoint_waits_for_the_lead_s_word_on_its_own_plan(rank: Rank) -> None:
    waiting = rank.waiting(PLAN)
    rank.record.plan(msgspec.structs.replace(PLAN, seq=PLAN.seq - 1, recorded=True))
    waiting.join(0.3)
    assert waiting.is_alive()
    rank.record.plan(msgspec.structs.replace(PLAN, recorded=True))
    waiting.join(30)
    assert not waiting.is_alive()
    rank.waiting(PLAN).join(30)  # it may come before the files are written


def test_a_checkpoint_waits_for_no_agent_that_is_away(rank: Rank) -> None:
    waiting = rank.waiting(PLAN)
    rank.is_away = True
    waiting.join(30)
    assert not waiting.is_alive()


@pytest.mark.parametrize("plan", [None, msgspec.structs.replace(PLAN, recorded=None)])
def test_a_lead_that_says_nothing_is_not_waited_for(rank: Rank, plan: m.StepPlan | None) -> None:
    """One of 0.2.0; or the checkpoint is of a signal."""
    waiting = rank.waiting(plan)
    waiting.join(30)
    assert not waiting.is_alive()


def test_the_records_of_this_node_are_on_its_disk_first(rank: Rank, tmp_path: Path) -> None:
    rank.agents.execute("INSERT INTO meta VALUES ('key', 'value')")
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        rank.record.wait(None)
    synced = {moment.path for moment in disk.moments if moment.call == "sync"}
    assert {"run-1/record.db-wal", "run-1/rank-0.db-wal"} <= synced
