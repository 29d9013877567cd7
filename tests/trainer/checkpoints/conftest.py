"""Fixtures of runs that have checkpoints."""

import pytest


@pytest.fixture
def run(tmp_path):
    """A run directory."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}", "utf-8")
    (tmp_path / "model" / "merges.txt").touch()  # an empty file is copied too
    return tmp_path / "runs" / "run-1"
