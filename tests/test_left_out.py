"""What a session prints of the tests that it left out."""

from types import SimpleNamespace
from typing import Any

import pytest
from tests import conftest


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
