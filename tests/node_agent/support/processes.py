"""Real processes for tests: Python on its own, and waiting with a deadline."""

import contextlib
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.trainers.supervisor import HostedTrainer, TrainerSupervisor
from trainctl.protocol.record.paths import RunPaths

T = TypeVar("T")
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def wait_for(what: Callable[[], T]) -> T:
    """The first true answer before the deadline."""
    answer: T = until(what, 20)
    return answer


def python(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Code in an interpreter of its own, its output to be read."""
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)


_LOCK = """
    import sqlite3, sys
    connection = sqlite3.connect(sys.argv[1], isolation_level=None)
    connection.execute("BEGIN IMMEDIATE")
    print("locked", flush=True)
    sys.stdin.read()
"""


@contextlib.contextmanager
def locked(database: Path) -> Iterator[int]:
    """Another process has a database locked meanwhile; its ID."""
    command = [sys.executable, "-c", textwrap.dedent(_LOCK), str(database)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        try:
            yield holder.pid
        finally:
            holder.stdin.close()


def kill_after(writer: subprocess.Popen[str], lines: int) -> list[str]:
    """Kill it once it has printed that many lines; the whole lines it got out from the last of those on."""
    assert writer.stdout is not None
    line = ""
    for _ in range(lines):
        line = writer.stdout.readline()
        assert line, "the writer ended by itself"
    writer.kill()
    rest = [line, *writer.stdout.read().splitlines(keepends=True)]
    writer.wait(HANG_SECONDS)
    writer.stdout.close()
    return [text for text in rest if text.endswith("\n")]


def alive(host: TrainerSupervisor, paths: RunPaths, rank: int = 0) -> HostedTrainer:
    """The trainer once its keeper has said who it is."""

    def known() -> HostedTrainer | None:
        found = host.find(paths, rank)
        assert found is not None, host.log_tail(paths, rank, 10)
        return found if found.pid is not None else None

    return wait_for(known)
