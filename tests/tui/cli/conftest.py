"""The command line finds no agent but those that its test starts."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state folder of the test's own: agents that a session keeps for other tests are in this worker's."""
    folder = tmp_path_factory.mktemp("state")
    monkeypatch.setenv("TRAINCTL_STATE", str(folder))
    return folder
