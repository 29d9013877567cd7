"""A copy to a path that broke off in the middle of a file."""

import shutil
from pathlib import Path

import pytest
from tests.trainer.support.written_checkpoints import written

from trainctl.protocol.record import checkpoints
from trainctl.trainer.checkpoints import copy_process, files
from trainctl.trainer.checkpoints.copy_process import to_path


def test_a_file_that_broke_off_is_continued_at_its_end(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = written(run, 3)
    whole = (folder / files.OPTIMIZER).read_bytes()
    part = tmp_path / "there" / "run-1" / "checkpoints" / ".step-3.part"
    part.mkdir(parents=True)
    (part / files.OPTIMIZER).write_bytes(whole[:5000])
    (part / files.WEIGHTS).write_bytes(b"x" * 100)  # of a step that was done again, or damaged
    copied = list[str]()
    copyfile = shutil.copyfile

    def copy(source: Path, target: Path) -> None:
        copied.append(source.name)
        copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", copy)
    synced = list[str]()
    sync = copy_process.sync
    monkeypatch.setattr(copy_process, "sync", lambda path: (synced.append(path.name), sync(path)))
    to_path(tmp_path / "there", folder)
    assert files.OPTIMIZER not in copied
    assert files.WEIGHTS in copied
    assert {files.OPTIMIZER, files.WEIGHTS} <= {*synced}
    there = part.with_name("step-3")
    assert (there / files.OPTIMIZER).read_bytes() == whole
    checkpoints.verify(there)
