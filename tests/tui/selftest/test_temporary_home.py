"""A temporary home leads processes away from the user's files, and is gone afterwards."""

import asyncio
import sys

import psutil
import pytest

from trainctl.protocol.record.paths import runtime_directory, state_root
from trainctl.protocol.security import keys
from trainctl.tui.selftest.temporary_home import TemporaryHome


def test_processes_see_only_the_temporary_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_SERVER_KEY", "k" * 40)
    monkeypatch.setenv("XDG_CONFIG_HOME", "/nowhere")
    home = TemporaryHome()
    try:
        assert "TRAINCTL_SERVER_KEY" not in home.environment and "XDG_CONFIG_HOME" not in home.environment
        for name, value in home.environment.items():
            monkeypatch.setenv(name, value)
        assert state_root().is_relative_to(home.folder)
        assert keys.default_folder().is_relative_to(home.folder)
        assert runtime_directory(home.state / "a").is_relative_to(home.runtime)
    finally:
        home.close()
    assert not home.folder.exists() and not home.runtime.exists()


async def test_a_cancelled_check_ends_its_process() -> None:
    home = TemporaryHome()
    try:
        waiting = asyncio.create_task(home.outcome_of("http.server", "0"))
        while not (children := _children()):
            await asyncio.sleep(0.02)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not any(child.is_running() for child in children)
    finally:
        home.close()


def _children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "http.server" in one.cmdline()]


async def test_a_process_that_says_nothing_is_a_failure() -> None:
    home = TemporaryHome()
    try:
        outcome = await home.outcome_of("trainctl.nothing")
    finally:
        home.close()
    assert outcome.status == "failed"
    assert outcome.evidence[0].startswith("the check's process ended with exit status 1: ")
    assert "No module named" in outcome.evidence[0] and sys.executable in outcome.evidence[0]
