"""Hooks, with a real program and a real server: what they are given, how long they may take, and how they fail."""

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.waiting import HANG_SECONDS, until

from trainctl.node_agent.alerts.hooks import BURST, HookCall, Hooks, Outcome, post, run_command
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertHooks

ALERT = m.AlertView(id="disk:mbp", kind="disk", severity="warning", text="4.2 GB left", raised_at=5.0, node="mbp")
CALL = HookCall("raised", 5.0, "studio", "run-1", "run", ALERT.text, ALERT)
KEEP = """
import json, os, sys
with open(sys.argv[1], "a") as file:
    print(json.dumps([json.load(sys.stdin), os.environ["TRAINCTL_ALERT_TEXT"]]), file=file)
"""


class Server:
    """Keeps what is posted, and answers with `status`."""

    def __init__(self) -> None:
        self.posted: list[Any] = []
        self.status = 204
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                server.posted.append((self.headers["Content-Type"], json.loads(body)))
                self.send_response(server.status)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                return None

        self._http = HTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._http.server_port}/alerts"
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    yield made
    made.close()


async def called(hooks: Hooks, calls: int, done: Any) -> None:
    task = asyncio.create_task(hooks.serve())
    for _ in range(calls):
        hooks.call(CALL)
    async with asyncio.timeout(HANG_SECONDS):
        while not done():
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_both_hooks_get_the_alert_and_are_called_only_so_often(tmp_path: Path, server: Server) -> None:
    script, kept = tmp_path / "keep.py", tmp_path / "kept"
    script.write_text(KEEP)
    problems: list[str] = []
    hooks = Hooks(
        AlertHooks(command=(sys.executable, "-S", str(script), str(kept)), webhook=server.address), problems.append
    )
    await called(hooks, 3, lambda: len(server.posted) == 3)
    (given, text), *_ = (json.loads(line) for line in kept.read_text().splitlines())
    assert server.posted[0] == ("application/json", given)
    assert given["event"] == "raised"
    assert given["alert"]["id"] == "disk:mbp"
    assert given["alert"]["text"] == text == "4.2 GB left"
    assert problems == []
    for _ in range(2 * BURST):
        hooks.call(CALL)
    assert len(problems) == 1
    assert "over 10 calls per minute" in problems[0]


async def test_failures_are_told_once_until_it_works_again(server: Server) -> None:
    problems: list[str] = []
    server.status = 500
    hooks = Hooks(AlertHooks(webhook=server.address), problems.append)
    await called(hooks, 3, lambda: len(server.posted) == 3)
    assert problems == [f"alert webhook failed: {server.address} answered 500 Internal Server Error"]
    assert "refused" in await post("http://127.0.0.1:9/", b"{}")


async def test_what_is_wrong_is_known_by_hook_and_is_over_when_that_hook_works(
    tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    new: list[str] = []
    broken, server.status = tmp_path / "broken", 500
    broken.touch()
    hooks = Hooks(AlertHooks(command=("sh", "-c", f"test ! -e {broken}"), webhook=server.address), new.append)
    of_command = "alert command failed: sh exited with 1"
    of_webhook = f"alert webhook failed: {server.address} answered 500 Internal Server Error"
    await hooks.make(CALL)
    assert hooks.problem == f"{of_command}; {of_webhook}"
    broken.unlink()
    await hooks.make(CALL)
    assert hooks.problem == of_webhook
    assert new == [of_command, of_webhook, ""]
    server.status = 204
    await hooks.make(CALL)
    for _ in range(BURST + 1):
        hooks.call(CALL)
    assert "over 10 calls per minute" in hooks.problem
    monkeypatch.setattr("trainctl.node_agent.alerts.hooks.PER_SECONDS", 0.0)  # a minute later
    hooks.call(CALL)
    assert hooks.problem == ""


async def test_a_command_is_killed_with_all_that_it_started_when_its_time_is_up(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep {2 * HANG_SECONDS:.0f} & echo $! > {pid_file}; wait"
    seconds = 0.1
    async with asyncio.timeout(HANG_SECONDS):
        while not pid_file.is_file() or not pid_file.read_text():  # a busy machine may take longer to begin the shell
            seconds *= 2
            outcome = await run_command(("sh", "-c", script), b"{}", {}, seconds=seconds)
    assert outcome == Outcome(None, f"sh took longer than {seconds:g} s and was killed")
    pid = int(pid_file.read_text())
    until(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)


async def test_what_a_failing_command_says_is_told_in_one_line() -> None:
    script = "echo first >&2; echo no mail >&2; exit 3"
    assert await run_command(("sh", "-c", script), b"{}", {}) == Outcome(3, "sh exited with 3: no mail")
    assert "No such file" in (await run_command(("/no/such/program",), b"{}", {})).problem


async def test_what_a_command_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    """In a session of its own, where it isn't killed either, with standard error open."""
    pid_file = tmp_path / "pid"
    leaves = f"os.setsid(); open({str(pid_file)!r}, 'w').write(str(os.getpid())); time.sleep({2 * HANG_SECONDS})"
    code = (
        f"import os, time\nif os.fork() == 0: {leaves}\nwhile not os.path.getsize({str(pid_file)!r}): pass\nos._exit(4)"
    )
    pid_file.touch()
    async with asyncio.timeout(HANG_SECONDS):
        command = ("sh", "-c", 'exec "$0" -S -c "$1"', sys.executable, code)
        outcome = await run_command(command, b"", {}, seconds=2 * HANG_SECONDS)
    os.kill(int(pid_file.read_text()), signal.SIGKILL)
    assert outcome.status == 4
