"""Where a node keeps things, what removing a run frees, and the lines of a log."""

import hashlib
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import names
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import log_format
from trainctl.protocol.record.paths import RunPaths


def test_the_state_folder_is_the_one_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    assert names.node_directory("studio") == tmp_path / "studio"
    assert names.node_directory("studio", tmp_path / "other") == tmp_path / "other" / "studio"
    monkeypatch.delenv("TRAINCTL_STATE")
    assert names.state_root().name == "trainctl"


def test_the_runtime_folder_is_short_private_and_its_node_s_own(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    node = tmp_path / "studio"
    made = names.runtime_directory(node)
    try:
        assert made == names.runtime_directory(node)
        assert made.stat().st_mode & 0o777 == 0o700
        assert len(str(made / "trainers.sock")) < 104  # what macOS allows
        other = names.runtime_directory(tmp_path / "mbp")
        assert other != made
        other.rmdir()
    finally:
        made.rmdir()


def test_the_sockets_folder_is_the_same_in_every_process_and_version(tmp_path: Path) -> None:
    """A trainer that outlives its agent, or an update, looks for the socket where it was."""
    code = "import sys, pathlib; from trainctl.protocol.config import names; "
    code += "print(names.runtime_directory(pathlib.Path(sys.argv[1])))"
    found = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "studio")],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True, text=True, timeout=HANG_SECONDS, check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }  # fmt: skip
    folder = names.runtime_directory(tmp_path / "studio")
    folder.rmdir()
    assert found == {str(folder)}
    digest = hashlib.sha256(str((tmp_path / "studio").resolve()).encode()).digest()
    assert folder.name == f"trainctl-{os.getuid()}-{int.from_bytes(digest[:8], 'big') % 16**8:08x}", "as in 0.2.0"


def test_a_folder_of_sockets_that_others_can_enter_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("long" * 30)))
    made = names.runtime_directory(tmp_path / "studio")
    try:
        made.chmod(0o777)
        with pytest.raises(InvalidInputError, match=r"mode 0777\); run: chmod 700 "):
            names.runtime_directory(tmp_path / "studio")
    finally:
        made.rmdir()
    made.symlink_to(tmp_path)
    try:
        with pytest.raises(InvalidInputError, match="not a folder of this user's"):
            names.runtime_directory(tmp_path / "studio")
    finally:
        made.unlink()


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


AT = 1763649065.123


def test_what_is_written_is_read_again_and_a_line_of_another_form_stays_whole() -> None:
    for text in ("g1.2 joined: 3 ranks", "", "  indented", "größer ✓"):
        line = log_format.write(AT, "WARNING", text)
        assert line.startswith("2025-11-20T14:31:05.123Z WARNING ")
        assert log_format.read(line) == log_format.LogLine(pytest.approx(AT, abs=1e-3), "WARNING", text)
    for line in (
        "", "Traceback (most recent call last):", "2025-11-20 14:31:05,123 INFO elsewhere",
        "2025-13-20T14:31:05Z INFO x", "[E1120 14:31:05] gloo: peer closed", "2025-11-20T14:31:05.123Z LOUD x",
    ):  # fmt: skip
        assert log_format.read(line) == log_format.LogLine(None, "", line)
    fields = {"levelname": "ERROR", "msg": "rank %s: %s", "args": (0, "no memory"), "created": AT}
    formatted = log_format.Formatter().format(logging.makeLogRecord(fields))
    assert formatted == "2025-11-20T14:31:05.123Z ERROR rank 0: no memory"
