"""Calls of the command line in tests: as the process a person starts, and what they leave behind."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
from tests.conftest import is_ours
from tests.waiting import HANG_SECONDS, until

from trainctl.tui.cli import main

COMMAND = [sys.executable, "-m", "trainctl.tui.cli.main"]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
DEADLINE_SECONDS = HANG_SECONDS


def call(*words: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """One command line to its end, in this process: half a second less than in one of its own."""
    out, err, hook = io.StringIO(), io.StringIO(), sys.excepthook
    arguments = [str(word) for word in words]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), patch.dict(os.environ, env):
        try:
            status = main.main(arguments)
        finally:
            sys.excepthook = hook
    return subprocess.CompletedProcess(arguments, status, out.getvalue(), err.getvalue())


def call_process(*words: str | Path, **env: str) -> "subprocess.CompletedProcess[str]":
    """One command line to its end, in a process of its own, with the state folder of the test."""
    env = {"TRAINCTL_STATE": os.environ["TRAINCTL_STATE"], **env}
    return subprocess.run(
        [*COMMAND, *map(str, words)], env={**ENVIRONMENT, **env}, capture_output=True, text=True, check=False,
        stdin=subprocess.DEVNULL, timeout=DEADLINE_SECONDS,
    )  # fmt: skip


def call_json(*words: str | Path, status: int = 0, **env: str) -> dict[str, Any]:
    """The one object that a `--json` call prints; its exit code must be `status`."""
    done = call(*words, "--json", **env)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.count("\n") == 1, done.stdout
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is (status == 0)
    return found


def assert_one_line(done: "subprocess.CompletedProcess[str]", status: int, *says: str) -> None:
    """A failure told in one line on standard error, and nothing on standard output."""
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout == ""
    assert done.stderr.startswith("trainctl: ")
    assert done.stderr.count("\n") == 1
    for text in says:
        assert text in done.stderr


@contextlib.contextmanager
def started(*words: str | Path, **options: Any) -> "Iterator[subprocess.Popen[str]]":
    """A command line that goes on; killed at the end if it hasn't ended by then."""
    usual = {"env": ENVIRONMENT, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen([*COMMAND, *map(str, words)], text=True, **(usual | options))
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def interrupt(process: "subprocess.Popen[str]") -> tuple[str, str]:
    """Ctrl-C, and what the process said until its end."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=DEADLINE_SECONDS)


def wait_until(what: Callable[[], Any], why: str, seconds: float = 90.0) -> Any:
    """The first true value of `what()`."""
    return until(what, seconds, why)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Live processes of this session that have a file in `folder` open, as its log, or name it in their command line:
    one that has a title doesn't."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # another user's, or it ends meanwhile
            if is_ours(process) and any(str(folder) in text for text in traces(process)):
                found.append(process)
    return found


def traces(process: psutil.Process) -> Iterator[str]:
    yield from process.cmdline()
    yield from (file.path for file in process.open_files())


def assert_none_left(folder: Path) -> None:
    wait_until(lambda: not processes_of(folder), f"processes of {folder} to end", 20)


def end_all(folder: Path) -> None:
    """End what a failed test left running."""
    for process in processes_of(folder):
        process.kill()
