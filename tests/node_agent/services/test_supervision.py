"""An agent under a supervisor: word to a real socket, an end when it stalls, a bounded log."""

import asyncio
import contextlib
import logging
import logging.handlers
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.node_agent.support.processes import ENVIRONMENT
from tests.waiting import HANG_SECONDS

from trainctl.node_agent.services import supervision
from trainctl.node_agent.services.supervision import LOOKS, Watchdog, from_environment, log_path, supervised
from trainctl.protocol import messages as m
from trainctl.protocol.errors import CRASH_STATUS
from trainctl.protocol.messages.events import Notice
from trainctl.protocol.record.log_format import read


@pytest.fixture
def supervisor(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify"))
        made.settimeout(10)
        yield made


def words(supervisor: socket.socket) -> list[str]:
    """Return what has come by now, without waiting."""
    found = []
    supervisor.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            found.append(supervisor.recv(4096).decode())
    return found


async def words_with(supervisor: socket.socket, word: str, count: int) -> list[str]:
    """Return what the supervisor has received once one word has come so often, and no more than that."""
    found: list[str] = []
    async with asyncio.timeout(HANG_SECONDS):
        while found.count(word) < count:
            await asyncio.sleep(0.02)
            found += words(supervisor)
    return found


def test_ready_beats_and_the_end_are_told_and_no_beat_while_the_loop_stands_still(supervisor: socket.socket) -> None:
    watched = {"WATCHDOG_USEC": "200000", "WATCHDOG_PID": str(os.getpid())}
    environment = {"NOTIFY_SOCKET": supervisor.getsockname(), **watched}
    doing = ["idle"]

    async def main() -> tuple[list[str], list[str], list[str]]:
        async with supervised(from_environment(environment), 0, lambda: doing[0], lambda: None):
            turning = await words_with(supervisor, "WATCHDOG=1", 2)
            time.sleep(0.3)  # longer than the watchdog's limit
            standing = words(supervisor)
            doing[0] = "conducts x"
            return turning, standing, await words_with(supervisor, "WATCHDOG=1\nSTATUS=conducts x", 1)

    turning, standing, after = asyncio.run(main())
    assert turning[0] == "READY=1\nSTATUS=idle"
    assert standing == []
    assert len(after) <= 2, "one beat that was due when the stall ended, and one with the new state"
    assert words(supervisor) == ["STOPPING=1"]
    assert environment == {}  # trainers, which inherit it, are not what is watched


@pytest.mark.parametrize(
    ("environment", "seconds"),
    [
        ({"WATCHDOG_USEC": "30000000"}, None),  # nobody to tell
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "7"}, 30.0),
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "8"}, None),  # another is meant
        ({"NOTIFY_SOCKET": "/run/x", "WATCHDOG_USEC": "soon"}, None),
    ],
)
def test_what_the_supervisor_asks_for_is_taken_from_the_environment(environment, seconds):
    with contextlib.closing(from_environment(environment, pid=7)) as notifier:
        assert notifier.watchdog_seconds == seconds


def test_a_name_without_a_file_and_a_supervisor_that_is_gone_or_hangs(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = f"trainctl-test-{os.getpid()}"
        listening.bind(f"\0{name}")
        with contextlib.closing(from_environment({"NOTIFY_SOCKET": f"@{name}"})) as notifier:
            notifier.ready("here")
            assert listening.recv(100) == b"READY=1\nSTATUS=here"
            for number in range(2000):  # nobody reads: neither an error nor a wait
                notifier.beat(f"{number}")
    with contextlib.closing(from_environment({"NOTIFY_SOCKET": str(tmp_path / "gone")})) as notifier:
        notifier.ready("here")
        notifier.stopping()


def test_a_stall_is_counted_in_looks_so_that_a_machine_that_slept_has_none() -> None:
    watchdog = Watchdog(3600.0, lambda: None)
    for _ in range(2):
        watchdog.beat()
        assert [watchdog.look() for _ in range(LOOKS + 1)] == [False] * LOOKS + [True]


STALLS = """
import asyncio, os, sys, time
from pathlib import Path
from trainctl.node_agent.services.supervision import Notifier, kept_log, supervised

async def main(folder, limit, stall):
    with kept_log(folder) as traces:
        async with supervised(Notifier("", None), limit, lambda: "busy", traces):
            await asyncio.sleep(2 * limit)
            print("turned", flush=True)
            getattr(sys.modules[__name__], stall)()
            print("woke", flush=True)

def sleep_soundly():
    time.sleep(3600)  # longer than the test waits

def sleep_with_the_log():
    import logging
    with logging.getLogger().handlers[0].lock:
        time.sleep(3600)

asyncio.run(main(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3]))
"""


@pytest.mark.parametrize("way", ["sleep_soundly", "sleep_with_the_log"])
def test_a_loop_that_stands_still_ends_the_process_and_says_where(tmp_path: Path, way: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STALLS, str(tmp_path), "1.0", way], env=ENVIRONMENT,
        capture_output=True, text=True, timeout=HANG_SECONDS, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (CRASH_STATUS, "turned\n")
    if way == "sleep_soundly":  # else the log can't be had, which is no reason to stay
        text = log_path(tmp_path).read_text()
        assert " CRITICAL the event loop hung for " in text
        assert "in sleep_soundly" in text
        assert done.stderr.count("\n") == 1 and "CRITICAL" in done.stderr


def test_the_log_has_events_is_bounded_and_leaves_tracebacks_off_standard_error(tmp_path, capfd):
    event = m.Event(id=1, at=0.0, severity="warning", by="auto", data=Notice("rank 2 is lost"), run="r-1")
    with supervision.kept_log(tmp_path, limit_bytes=4000):
        supervision.log_event(event)
        try:
            raise ValueError("a fault")
        except ValueError:
            supervision.log.exception("ended by an internal error")
        first = log_path(tmp_path).read_text().splitlines()
        for number in range(400):
            supervision.log.info("line %s %s", number, "x" * 80)
    assert (read(first[0]).level, read(first[0]).text) == ("WARNING", "r-1: rank 2 is lost")
    assert any("Traceback" in line for line in first)
    files = sorted(path.name for path in (tmp_path / "logs").iterdir())
    assert files == ["agent.log", "agent.log.1", "agent.log.2", "agent.log.3"]
    assert all((tmp_path / "logs" / name).stat().st_size <= 4000 for name in files)
    assert "line 399 " in log_path(tmp_path).read_text()
    assert [read(line).text for line in capfd.readouterr().err.splitlines()] == [
        "r-1: rank 2 is lost",
        "ended by an internal error",
    ]
    assert not any(
        isinstance(handler, logging.handlers.RotatingFileHandler) for handler in logging.getLogger().handlers
    )


def test_the_file_that_launchd_gives_is_begun_anew_when_it_is_long(tmp_path: Path) -> None:
    code = """if True:
        import sys
        from trainctl.node_agent.services import supervision
        supervision.shorten_boot_log(50)
        print("new", file=sys.stderr)
    """
    boot = tmp_path / "boot.log"
    for before, after in (("x" * 50, "x" * 50 + "new\n"), ("x" * 51, "new\n")):
        boot.write_text(before)
        with boot.open("a") as stream:
            subprocess.run(
                [sys.executable, "-c", code], env=ENVIRONMENT, stderr=stream, timeout=HANG_SECONDS, check=True
            )
        assert boot.read_text() == after
