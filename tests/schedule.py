"""The order of tests and what each worker is given: pure tests first, then clusters and trainers, long files first.

A worker takes a file at a time, so that what the file's tests share is made once. Within a file and among pure files
the order is random.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from tests import tiers
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).parent
RECORD = ROOT / "durations.json"
"""Seconds by file of tests, of those that take long. `--record-durations` writes it."""
RECORDED_SECONDS = 2.0
CLUSTERS = "integration"
PURE = ("architecture", "deploy", "node_agent", "protocol", "tools", "tui")


def file_of(name: str) -> str:
    """Return the file of a test's node ID or path, relative to tests/."""
    return name.partition("::")[0].removeprefix("tests/")


def in_order(items: list[pytest.Item]) -> list[pytest.Item]:
    """Return tests in the order in which they are handed out; what was in random order stays so among equals."""
    seconds = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}

    def place(item: pytest.Item) -> tuple[int, float, str]:
        file = item.path.relative_to(ROOT).as_posix()
        folder = file.partition("/")[0]
        if folder in PURE:
            return 0, 0.0, ""
        # A cluster mostly waits for its processes: the other worker has the trainers' tests meanwhile.
        is_first = folder == CLUSTERS
        return (1 if is_first else 2), -seconds.get(file, 0.0), file

    return sorted(items, key=place)


class ByFile(LoadScopeScheduling):
    """Gives a worker a file at a time; in the quick tier one worker has all clusters, one after another."""

    def _split_scope(self, nodeid: str) -> str:
        file = file_of(nodeid)
        return CLUSTERS if file.startswith(f"{CLUSTERS}/") and tiers.is_quick() else file


class Schedule:
    """A plugin of the process that hands out tests to workers, or runs all of them."""

    def __init__(self) -> None:
        self._seconds: defaultdict[str, float] = defaultdict(float)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> ByFile:
        config.option.loadscopereorder = False  # by number of tests, which says little of their seconds
        return ByFile(config, log)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[file_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if session.config.getoption("--record-durations"):
            known = json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else {}
            known.update(self._seconds)
            kept = {
                file: round(seconds)
                for file, seconds in sorted(known.items())
                if seconds >= RECORDED_SECONDS and not file.startswith(PURE) and (ROOT / file).is_file()
            }
            RECORD.write_text(json.dumps(kept, indent=0) + "\n", "utf-8")
