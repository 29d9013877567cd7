"""Where a node keeps things."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.protocol.record import paths


def test_the_state_folder_is_the_one_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    assert paths.node_directory("studio") == tmp_path / "studio"
    assert paths.node_directory("studio", tmp_path / "other") == tmp_path / "other" / "studio"
    monkeypatch.delenv("TRAINCTL_STATE")
    assert paths.state_root().name == "trainctl"


def test_files_of_a_run(tmp_path: Path) -> None:
    run = paths.RunPaths(tmp_path / "node" / "runs" / "r")
    names = {run.run_file, run.record, run.checkpoints, run.logs, run.rank_record(0), run.rank_record(1)}
    names |= {run.status_page(0), run.process(0), run.log(0), run.log(1), run.checkpoint(10)}
    assert len(names) == 11
    assert all(name.is_relative_to(run.directory) for name in names)
    assert run.node_data == tmp_path / "node" / "data"
    assert run.checkpoint(10).parent == run.checkpoints


def test_the_runtime_folder_is_short_private_and_its_node_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    node = tmp_path / "studio"
    made = paths.runtime_directory(node)
    try:
        assert made == paths.runtime_directory(node)
        assert made.stat().st_mode & 0o777 == 0o700
        assert len(str(made / "trainers.sock")) < 104  # what macOS allows
        other = paths.runtime_directory(tmp_path / "mbp")
        assert other != made
        other.rmdir()
    finally:
        made.rmdir()


def test_the_hash_is_the_same_in_every_process() -> None:
    code = "from trainctl.protocol.record.paths import hash_text; print(hash_text('studio'))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert found == {f"{paths.hash_text('studio')}\n"}
    assert paths.hash_text("studio") != paths.hash_text("mbp")
