"""A new policy is a declaration and a module: a patch of two files, and it works everywhere."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.waiting import HANG_SECONDS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
PATCH = HERE / "new_policy.patch"
PATCHED = ("protocol", "node_agent")


@pytest.mark.needs("git")
def test_a_new_policy_touches_two_files_and_works(tmp_path: Path) -> None:
    changed = [line[6:] for line in PATCH.read_text("utf-8").splitlines() if line.startswith("+++ b/")]
    assert len(changed) == 2 and all(path.startswith(PATCHED) for path in changed)
    for room in PATCHED:
        shutil.copytree(ROOT / room, tmp_path / room, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(PATCH)], cwd=tmp_path, check=True)
    places = [*(str(tmp_path / room) for room in PATCHED), str(ROOT)]
    (tmp_path / "state").mkdir()
    ended = subprocess.run(
        [sys.executable, str(HERE / "try_new_policy.py"), str(tmp_path / "state")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)}, capture_output=True, text=True, check=False,
        timeout=HANG_SECONDS,
    )  # fmt: skip
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
