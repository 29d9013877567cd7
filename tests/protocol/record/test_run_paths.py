"""The files of a run directory: what removing it frees."""

import os
from pathlib import Path

from trainctl.protocol.record.paths import RunPaths


def test_files_that_a_branch_has_too_are_not_freed(tmp_path: Path) -> None:
    own, branch = tmp_path / "own", tmp_path / "branch"
    for folder in (own, branch):
        (folder / "checkpoints").mkdir(parents=True)
    before = RunPaths(own).size_bytes
    (own / "record.db").write_bytes(b"x" * 65536)
    (own / "checkpoints" / "weights").write_bytes(b"x" * 65536)
    os.link(own / "checkpoints" / "weights", own / "checkpoints" / "newest")
    assert RunPaths(own).size_bytes - before == 2 * 65536
    os.link(own / "checkpoints" / "weights", branch / "checkpoints" / "weights")
    assert RunPaths(own).size_bytes - before == 65536
    assert RunPaths(tmp_path / "gone").size_bytes == 0
