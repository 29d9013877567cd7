"""Fixtures of recorded runs."""

from pathlib import Path

import pytest
from tests.integration.support.release import unpack

LEAST_RUNS = 12


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The records of all nodes, by node and name."""
    folder = unpack("state.tar.xz", tmp_path_factory.mktemp("frozen"))
    found = {f"{one.parts[-4]} {one.parent.name.split('-2026')[0]}": one.parent
             for one in folder.glob("state/*/runs/*/record.db")}  # fmt: skip
    assert len(found) >= LEAST_RUNS
    return found
