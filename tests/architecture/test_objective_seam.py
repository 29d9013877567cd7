"""An objective is added in its table and a module of its own: shown with a patch that adds one, on a copy."""

from pathlib import Path

import pytest
from tests.architecture.patched_tree import PATCHES, patched, run_in, touched

PATCH = PATCHES / "new_objective.patch"

pytestmark = [pytest.mark.tier("all"), pytest.mark.needs("git")]  # it applies the patch


def test_a_new_objective_touches_two_files() -> None:
    assert [Path(name).name for name in touched(PATCH)] == ["objectives.py", "sft_z.py"]


def test_a_new_objective_trains_on_both_backends_and_shows_its_metric(tmp_path: Path) -> None:
    done = run_in(patched(PATCH, tmp_path), "-m", "tests.architecture.new_objective_walk")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["walked"]), done.stdout + done.stderr
