"""A temporary home leads processes away from the user's files, and is gone afterwards."""

import asyncio
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.services import model, service_trial
from trainctl.protocol.record.paths import runtime_directory, state_root
from trainctl.protocol.security import keys
from trainctl.tui.selftest import check_list
from trainctl.tui.selftest.shared_parts import SharedParts
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


def test_processes_find_what_pip_installed_for_the_user() -> None:
    home = TemporaryHome()
    try:
        words = (sys.executable, "-c", "import site; print(site.getuserbase())")
        said = subprocess.run(words, env=home.environment, capture_output=True, text=True, check=True).stdout
        assert home.environment["HOME"] == str(home.folder)
        assert said.strip() == site.getuserbase()
    finally:
        home.close()


def test_what_checks_share_makes_no_folder_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[str]()
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **named: made.append(str(named)))
    SharedParts()
    assert made == []


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


@pytest.mark.parametrize(("leave_seconds", "ends"), [(HANG_SECONDS, True), (0.0, False)])
async def test_a_process_that_does_not_end_is_killed_only_after_its_time(leave_seconds: float, ends: bool) -> None:
    home = TemporaryHome()
    mark = home.folder / "cleaned-up"
    (home.folder / "slow.py").write_text(SLOW)
    environment = {**home.environment, "PYTHONPATH": str(home.folder)}
    waiting = asyncio.create_task(
        home.outcome_of("slow", str(mark), leave_seconds=leave_seconds, environment=environment)
    )
    try:
        await _there(mark.with_suffix(".ready"))
        waiting.cancel()
        if ends:
            await _there(mark.with_suffix(".asked"))
            mark.with_suffix(".go").touch()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert mark.exists() == ends
    finally:
        home.close()


async def _there(file: Path) -> None:
    while not file.exists():
        await asyncio.sleep(0.02)


def _children() -> list[psutil.Process]:
    return [one for one in psutil.Process().children() if "http.server" in one.cmdline()]


SLOW = '''"""On SIGTERM, cleans up once it may."""
import pathlib, signal, sys, time

mark = pathlib.Path(sys.argv[1])

def clean_up(*_):
    mark.with_suffix(".asked").touch()
    while not mark.with_suffix(".go").exists():
        time.sleep(0.02)
    mark.touch()
    sys.exit(1)

signal.signal(signal.SIGTERM, clean_up)
mark.with_suffix(".ready").touch()
time.sleep(3600)
'''


def test_the_service_has_time_to_be_removed() -> None:
    assert check_list.SERVICE_LEAVE_SECONDS > model.STOP_SECONDS + service_trial.WAIT_SECONDS


async def test_a_process_that_says_nothing_is_a_failure() -> None:
    home = TemporaryHome()
    try:
        outcome = await home.outcome_of("trainctl.nothing")
    finally:
        home.close()
    assert outcome.status == "failed"
    assert outcome.evidence[0].startswith("the check's process ended with exit status 1: ")
    assert "No module named" in outcome.evidence[0] and sys.executable in outcome.evidence[0]
