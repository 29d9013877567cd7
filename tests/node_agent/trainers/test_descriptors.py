"""With no file descriptor left an agent can't look at its trainers: that is no sign that they have died."""

import errno
import os
from pathlib import Path

import pytest

from trainctl.node_agent.trainers.rank_ports import LocalRank, Look
from trainctl.node_agent.trainers.supervisor import TrainerSupervisor
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine import shim
from trainctl.protocol.record.paths import RunPaths


@pytest.fixture
def rank(tmp_path: Path) -> LocalRank:
    """One whose trainer, this process, is seen once."""
    paths = RunPaths(tmp_path)
    known = {"pid": os.getpid(), "keeper_pid": 1, "start_time": shim.start_time(os.getpid()), "started_at": 0.0}
    shim.write_record(paths.process(0), {**known, "boot_id": shim.boot_id(), "command": ["x"]})
    return LocalRank(TrainerSupervisor(), _Link(), paths, "a", 0)  # type: ignore[arg-type]


class _Link:
    def held(self, run: str, rank: int) -> None:
        return None


def none_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Path, "read_text", refuse)


def test_a_trainer_that_cannot_be_looked_at_is_as_it_was(rank, monkeypatch):
    assert rank.look() == Look(os.getpid())
    with monkeypatch.context() as patch:
        none_left(patch)
        assert rank.look() == Look(os.getpid())
        with pytest.raises(OSError, match="Too many open files"):
            shim.start_time(os.getpid())
    assert shim.start_time(2**22 + 1) is None


async def test_none_is_started_beside_one_that_cannot_be_looked_at(rank, monkeypatch):
    none_left(monkeypatch)
    with pytest.raises(RefusedError, match="Too many open files"):
        await rank.start_again()
