"""Checks are run in turn, within their limits; one that fails or hangs ends only itself, and leaves the user's home."""

import asyncio
from typing import Any

import pytest

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.machine.check_outcome import CheckOutcome, passed
from trainctl.protocol.record.paths import runtime_directory, state_root
from trainctl.protocol.security import keys
from trainctl.tui.selftest.check_runner import Check, run_checks
from trainctl.tui.selftest.temporary_home import TemporaryHome


async def test_a_check_that_fails_or_hangs_does_not_stop_the_others() -> None:
    left: list[str] = []

    async def refused(_: Any) -> CheckOutcome:
        raise RefusedError("the agent\nrefuses")

    async def hangs(shared: list[str]) -> CheckOutcome:
        try:
            await asyncio.Event().wait()
        finally:
            shared.append("cleaned up")
        return passed()

    async def good(_: Any) -> CheckOutcome:
        return passed("fine", watts=3.5)

    checks = Check("a", "", 9, refused), Check("b", "", 0.1, hangs), Check("c", "", 9, good)
    found = [result.outcome async for result in run_checks(checks, left)]
    assert [one.status for one in found] == ["failed", "failed", "ok"]
    assert found[0].evidence == ("RefusedError: the agent refuses",) and left == ["cleaned up"]
    assert found[2].figures == {"watts": 3.5}


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
