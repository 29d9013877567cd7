"""A terminal that goes away ends the program, also where no signal says so and where it had stopped taking what is
drawn."""

import os
import pty
import signal
import subprocess
import sys
import threading

import pytest
from tests.waiting import HANG_SECONDS

from trainctl.tui.terminal.driver import TerminalOutput

DEADLINE_SECONDS = HANG_SECONDS


def read_until(master: int, word: bytes) -> None:
    seen = b""
    while word not in seen:
        seen += os.read(master, 65536)


@pytest.mark.parametrize("stalled", [False, True])
def test_the_program_ends(stalled: bool) -> None:
    """In a session of its own without a terminal of its own, it is sent no signal."""
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "trainctl.tui.cli.main", "attach", "--connect", "tcp://127.0.0.1:9"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    ) as process:
        os.close(slave)
        try:
            read_until(master, b"connecting")
            if stalled:  # more is drawn than the line holds and Textual lets wait
                for _ in range(60):
                    os.write(master, b"?\x1bt")
            os.close(master)
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGHUP
        finally:
            process.kill()


def test_what_is_written_to_a_terminal_that_is_gone_is_taken_and_told_of_once() -> None:
    master, slave = pty.openpty()
    told = threading.Event()
    calls: list[int] = []

    def gone() -> None:
        calls.append(1)
        told.set()

    with os.fdopen(slave, "w") as file:
        outlet = TerminalOutput(file, gone)
        assert outlet.fileno() == slave
        outlet.write("here")
        outlet.flush()
        assert os.read(master, 100) == b"here"
        assert not told.is_set()
        os.close(master)
        for _ in range(3):
            assert outlet.write("there") == 5
            outlet.flush()
        assert calls == [1]
        with pytest.raises(OSError, match="Input/output"):
            file.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), slave)  # what the file still holds goes nowhere
