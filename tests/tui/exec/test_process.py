"""A command under `Process` does what it does without: output, terminal, signals and exit status."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.tui.support.typist import Typist
from tests.waiting import HANG_SECONDS, until

DRIVER = """
import os, sys
from trainctl.tui.exec.process import Process
copy = os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
sys.exit(Process(sys.argv[2:], {**os.environ}, lambda data, stream: os.write(copy, data)).run())
"""


def under_process(copy: Path, *command: str) -> list[str]:
    return [sys.executable, "-c", DRIVER, str(copy), *command]


def run(copy: Path, *command: str, stdin: str = "") -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        under_process(copy, *command), env=ENVIRONMENT, input=stdin, capture_output=True, text=True,
        check=False, timeout=HANG_SECONDS,
    )  # fmt: skip


@contextlib.contextmanager
def begun(copy: Path, *command: str) -> Iterator["subprocess.Popen[str]"]:
    process = subprocess.Popen(
        under_process(copy, *command), env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_output_passes_unchanged_and_is_copied(tmp_path: Path) -> None:
    done = run(tmp_path / "copy", "sh", "-c", "cat; echo bad >&2; exit 3", stdin="one\ntwo\n")
    assert (done.returncode, done.stdout, done.stderr) == (3, "one\ntwo\n", "bad\n")
    assert sorted((tmp_path / "copy").read_text().splitlines()) == ["bad", "one", "two"]


def test_both_streams_of_one_file_keep_their_order(tmp_path: Path) -> None:
    output = tmp_path / "output"
    script = "for i in 1 2 3 4 5 6 7 8 9; do echo out $i; echo err $i >&2; done"
    with output.open("wb") as file:
        subprocess.run(under_process(tmp_path / "copy", "sh", "-c", script), env=ENVIRONMENT, stdout=file, stderr=file)
    assert output.read_text().split("\n")[:-1] == [f"{name} {at}" for at in range(1, 10) for name in ("out", "err")]


def test_a_reader_that_goes_ends_the_command_as_without(tmp_path: Path) -> None:
    with begun(tmp_path / "copy", "sh", "-c", "while echo y; do :; done; echo over >&2") as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "y\n"
        process.stdout.close()
        assert process.wait(HANG_SECONDS) == 128 + signal.SIGPIPE
        process.stdout = None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_is_passed_on(tmp_path: Path, number: signal.Signals) -> None:
    name = number.name.removeprefix("SIG")
    script = f"trap 'echo {name}; exit 9' {name}; echo ready; while :; do sleep 0.02; done"
    with begun(tmp_path / "copy", "sh", "-c", script) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.communicate(timeout=HANG_SECONDS)[0] == f"{name}\n"
        assert process.returncode == 9


def test_the_status_of_a_command_that_a_signal_ended_is_that_of_a_shell(tmp_path: Path) -> None:
    assert run(tmp_path / "copy", "sh", "-c", "kill -KILL $$").returncode == 128 + signal.SIGKILL


def test_a_stopped_command_stops_it_and_goes_on_with_it(tmp_path: Path) -> None:
    with begun(tmp_path / "copy", "sh", "-c", "echo $$; kill -STOP $$; echo over") as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        ours = psutil.Process(process.pid)
        until(lambda: ours.status() == psutil.STATUS_STOPPED, 60, "it to stop with its command")
        assert psutil.Process(pid).status() == psutil.STATUS_STOPPED
        process.send_signal(signal.SIGCONT)
        assert process.communicate(timeout=HANG_SECONDS)[0] == "over\n"
        assert process.returncode == 0


def test_whoever_keeps_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    """As without: the command has ended. What it says until then is there."""
    done = run(tmp_path / "copy", "sh", "-c", "(sleep 0.1; echo late) & (exec sleep 1000) & echo $!; exit 4")
    pid, late = done.stdout.split()
    os.kill(int(pid), signal.SIGKILL)
    assert (done.returncode, late) == (4, "late")


def test_a_terminal_stays_one(tmp_path: Path) -> None:
    script = "stty size; [ -t 0 ] && [ -t 1 ] && [ -t 2 ] && echo all; read line; echo got $line; trap 'echo int' INT"
    script += "; trap 'stty size; exit 5' WINCH; echo wait; while :; do sleep 0.02; done"
    driver = under_process(tmp_path / "copy", "sh", "-c", script)
    line = [
        "sh",
        "-c",
        'stty rows 31 cols 99; echo "before $(stty -g)"; "$@"; echo "status $?"; echo "after $(stty -g)"',
    ]
    typist = Typist([*line, "sh", *driver], TERM="xterm")
    typist.until("31 99\r\nall\r\n")
    typist.type("hello\r")
    typist.until("got hello\r\nwait\r\n")
    typist.type("\x03")
    typist.until("int\r\n")
    typist.resize(40, 20)
    typist.until("20 40\r\n")
    typist.until("after .*\r\n")
    typist.ended()
    assert typist.until("status 5")
    assert typist.until("before (.*)\r\n")[1] == typist.until("after (.*)\r\n")[1]
    assert b"got hello\r\n" in (tmp_path / "copy").read_bytes()


@pytest.mark.parametrize("ending", ["kill -KILL $$", "kill -TERM $PPID; sleep 1000"])
def test_the_terminal_is_as_before_however_it_ends(tmp_path: Path, ending: str) -> None:
    driver = under_process(tmp_path / "copy", "sh", "-c", f"sleep 0.2; {ending}")
    line = ["sh", "-c", 'echo "before $(stty -g)"; "$@"; echo "status $?"; echo "after $(stty -g)"', "sh"]
    typist = Typist([*line, *driver], TERM="xterm")
    status = typist.until("status (\\d+)")[1]
    typist.until("after .*\r\n")
    typist.ended()
    assert int(status) == 128 + (signal.SIGKILL if "KILL" in ending else signal.SIGTERM)
    assert typist.until("before (.*)\r\n")[1] == typist.until("after (.*)\r\n")[1]


def test_only_the_streams_that_are_terminals_are_one(tmp_path: Path) -> None:
    script = "[ -t 0 ] && echo in; [ -t 1 ] && echo out >&2; [ -t 2 ] && echo err >&2; exit 0"
    driver = under_process(tmp_path / "copy", "sh", "-c", script)
    typist = Typist(["sh", "-c", f'"$@" < /dev/null > {tmp_path}/out; echo "status $?"', "sh", *driver], TERM="xterm")
    typist.until("status 0")
    typist.ended()
    assert typist.said == "err\r\nstatus 0\r\n"
    assert (tmp_path / "out").read_text() == ""
