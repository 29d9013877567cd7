"""A real terminal for tests: tmux, which shows what is on the screen and how the terminal was left."""

import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.waiting import HANG_SECONDS, until

needs_tmux = pytest.mark.needs("tmux")
TRAINCTL = shlex.join([sys.executable, "-m", "trainctl.tui.cli.main"])


class Terminal:
    """One tmux server of its own, one window."""

    def __init__(self, folder: Path, columns: int, lines: int, command: str) -> None:
        self._socket = f"trainctl-{uuid.uuid4().hex[:8]}"
        self._exit, self._lines = folder / "exit", folder / "stty"
        stty = f"stty -g >> {shlex.quote(str(self._lines))}"
        shell = f"{stty}; {command}; status=$?; {stty}; echo status=$status > {shlex.quote(str(self._exit))}; read -r"
        self._tmux("-f", "/dev/null", "new-session", "-d", "-x", str(columns), "-y", str(lines), shell)

    def _tmux(self, *arguments: str) -> str:
        done = subprocess.run(
            ["tmux", "-L", self._socket, *arguments], capture_output=True, text=True, timeout=HANG_SECONDS
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def screen(self) -> str:
        return self._tmux("capture-pane", "-p", "-J")

    def keys(self, *keys: str) -> None:
        self._tmux("send-keys", *keys)

    def resize(self, columns: int, lines: int) -> None:
        self._tmux("resize-window", "-x", str(columns), "-y", str(lines))

    def paste(self, text: str) -> None:
        """As a person pastes: bracketed where the program asked for that."""
        self._tmux("set-buffer", "--", text)
        self._tmux("paste-buffer", "-p")

    def program(self) -> psutil.Process:
        """The one under the shell."""
        shell = psutil.Process(int(self._tmux("display-message", "-p", "#{pane_pid}")))
        (program,) = [child for child in shell.children() if child.name() != "stty"]
        return program

    def is_clean(self) -> bool:
        """Return whether the terminal is as it was before: its first screen, a cursor, no mouse, the same line
        settings."""
        flags = self._tmux("display-message", "-p", "#{alternate_on}#{mouse_any_flag}#{cursor_flag}#{keypad_flag}")
        before, *after = self._lines.read_text().split()
        return flags.strip() == "0010" and after == [before]

    def wait_for(self, pattern: str) -> str:
        """The screen once `pattern` is on it."""
        return self._screen_if(lambda screen: re.search(pattern, screen), f"{pattern!r}")

    def wait_gone(self, pattern: str) -> str:
        """The screen once `pattern` is no longer on it: a key sent right after Escape would be read as Alt with it."""
        return self._screen_if(lambda screen: not re.search(pattern, screen), f"a screen without {pattern!r}")

    def _screen_if(self, holds: Callable[[str], object], what: str) -> str:
        """Return what it shows is progress, and what a failure tells."""
        shown = [""]

        def look() -> str | None:
            shown[0] = self.screen()
            return shown[0] if holds(shown[0]) else None

        return str(until(look, 40, what, lambda: shown[0]))

    def exit_status(self) -> str:
        until(lambda: self._exit.exists() and self._exit.read_text(), 20, "the program's end", self.screen)
        return self._exit.read_text().strip()

    def close(self) -> None:
        subprocess.run(
            ["tmux", "-L", self._socket, "kill-server"], capture_output=True, timeout=HANG_SECONDS, check=False
        )
