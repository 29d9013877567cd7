"""What a session prints of the tests that it left out, and its end."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests import conftest
from tests.waiting import HANG_SECONDS


def test_what_workers_left_out_is_in_the_summary() -> None:
    config: Any = SimpleNamespace(stash=pytest.Stash(), getoption=lambda name: False)
    for output in ({"lacking": {"cuda": 2, "chromium": 3}}, {}):
        conftest.pytest_testnodedown(SimpleNamespace(config=config, workeroutput=output))
    conftest.pytest_testnodedown(SimpleNamespace(config=config))  # one that crashed
    said: list[str] = []
    reporter: Any = SimpleNamespace(stats={}, write_line=lambda line, yellow: said.append(line))
    conftest.pytest_terminal_summary(reporter, config)
    assert said == [
        f"without {what}: {count} tests that need it were left out" for what, count in (("chromium", 3), ("cuda", 2))
    ]


def test_a_session_ends_well_without_the_cache_of_pytest() -> None:
    """`make debian` has none."""
    words = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--collect-only", "-q", __file__]
    done = subprocess.run(
        words, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=False, timeout=HANG_SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr
