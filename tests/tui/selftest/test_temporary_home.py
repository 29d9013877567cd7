"""A temporary home leads processes away from the user's files, and is gone afterwards."""

import pytest

from trainctl.protocol.record.paths import runtime_directory, state_root
from trainctl.protocol.security import keys
from trainctl.tui.selftest.temporary_home import TemporaryHome


def test_processes_see_only_the_temporary_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_SERVER_KEY", "k" * 40)
    home = TemporaryHome()
    try:
        assert "TRAINCTL_SERVER_KEY" not in home.environment
        for name, value in home.environment.items():
            monkeypatch.setenv(name, value)
        assert state_root().is_relative_to(home.folder)
        assert keys.default_folder().is_relative_to(home.folder)
        assert runtime_directory(home.state / "a").is_relative_to(home.runtime)
    finally:
        home.close()
    assert not home.folder.exists() and not home.runtime.exists()
