"""Fixtures of runs that have checkpoints."""

import pytest
from tests.trainer.support.written_checkpoints import run_directory


@pytest.fixture
def run(tmp_path):
    """A run directory."""
    return run_directory(tmp_path)
