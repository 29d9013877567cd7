"""A terminal that goes away ends the program, and one that stays is left as it was."""

import os
import pty
import signal
import subprocess
import sys
import termios

from tests.waiting import HANG_SECONDS

DEADLINE_SECONDS = HANG_SECONDS


def read_until(master: int, word: bytes) -> None:
    seen = b""
    while word not in seen:
        seen += os.read(master, 65536)


def test_the_program_ends_with_its_terminal() -> None:
    master, slave = pty.openpty()
    program = "import os, sys; os.login_tty(0); from trainctl.tui.cli.main import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "attach", "--connect", "tcp://127.0.0.1:9"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, env=environment) as process:
        os.close(slave)
        try:
            read_until(master, b"connecting")
            os.close(master)
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGHUP
        finally:
            process.kill()


def test_a_terminal_is_left_as_it_was_on_sigterm() -> None:
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    command = [sys.executable, "-m", "trainctl.tui.cli.main", "attach", "--connect", "tcp://127.0.0.1:9"]
    environment = {**os.environ, "TERM": "xterm-256color"}
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
    ) as process:
        try:
            read_until(master, b"connecting")
            assert termios.tcgetattr(slave) != before
            process.terminate()
            read_until(master, b"\x1b[?1000l")
            assert process.wait(DEADLINE_SECONDS) == 128 + signal.SIGTERM
            assert termios.tcgetattr(slave) == before
        finally:
            process.kill()
            os.close(slave)
            os.close(master)
