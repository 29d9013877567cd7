"""Someone at a real terminal of their own, who reads what a command says and types."""

import os
import pty
import re
import select
import termios
import time

import pytest
from tests.tui.support.cli_calls import ENVIRONMENT
from tests.waiting import HANG_SECONDS

DEADLINE_SECONDS = HANG_SECONDS


class Typist:
    """A command on a terminal, by someone who answers what it asks."""

    def __init__(self, words: list[str], **env: str) -> None:
        self.said = ""
        self.pid, self._terminal = pty.fork()
        if self.pid == 0:
            os.execvpe(words[0], words, {**ENVIRONMENT, **env})

    def until(self, pattern: str) -> re.Match[str]:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while (found := re.search(pattern, self.said)) is None:
            assert time.monotonic() < deadline, self.said
            if select.select([self._terminal], [], [], 1.0)[0]:
                try:
                    self.said += os.read(self._terminal, 4096).decode()
                except OSError:
                    pytest.fail(f"it ended: {self.said}")
        return found

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def resize(self, columns: int, lines: int) -> None:
        termios.tcsetwinsize(self._terminal, (lines, columns))

    def ended(self) -> int:
        try:
            while said := os.read(self._terminal, 4096):
                self.said += said.decode()
        except OSError:  # the other side is closed
            pass
        os.close(self._terminal)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
