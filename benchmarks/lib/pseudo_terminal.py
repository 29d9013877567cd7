"""A program in a real pseudo-terminal: its bytes counted and drawn on a small screen of text, its costs read."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

_TOKEN = re.compile(
    r"\x1b\[([0-9;?<>=]*)([A-Za-z@`])"  # CSI
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1bP.*?\x1b\\|\x1b[()][0-9A-Z]|\x1b[=>78cDEHMNOZ]"
    r"|([^\x00-\x1f\x7f\x1b]+)|([\r\n\b])",
    re.DOTALL,
)
_UNFINISHED = re.compile(r"\x1b[^A-Za-z]*\Z|\x1b\][^\x07]*\Z|\x1bP[^\x1b]*\Z", re.DOTALL)


class Screen:
    """The text that a terminal of `columns` x `rows` shows; colours and scrolling regions are left out."""

    def __init__(self, columns: int, rows: int) -> None:
        self.columns, self.rows = columns, rows
        self._cells = [[" "] * columns for _ in range(rows)]
        self._row = self._column = 0
        self._rest = ""

    @property
    def text(self) -> str:
        return "\n".join("".join(row) for row in self._cells)

    def line(self, row: int) -> str:
        return "".join(self._cells[row])

    def feed(self, text: str) -> None:
        text = self._rest + text
        unfinished = _UNFINISHED.search(text)
        self._rest = text[unfinished.start() :] if unfinished else ""
        for found in _TOKEN.finditer(text[: unfinished.start()] if unfinished else text):
            arguments, final, words, control = found.groups()
            if words is not None:
                self._print(words)
            elif final is not None:
                self._move(arguments, final)
            elif control == "\r":
                self._column = 0
            elif control == "\n":
                self._row = min(self._row + 1, self.rows - 1)
            elif control == "\b":
                self._column = max(self._column - 1, 0)

    def _print(self, words: str) -> None:
        for character in words:
            if self._column < self.columns:
                self._cells[self._row][self._column] = character
                self._column += 1

    def _move(self, arguments: str, final: str) -> None:
        if arguments[:1] in ("?", "<", ">", "="):
            return
        numbers = [int(part) if part else 0 for part in arguments.split(";")]
        count = max(numbers[0], 1)
        if final in "Hf":
            self._row = min(count, self.rows) - 1
            self._column = min(max(numbers[1] if len(numbers) > 1 else 1, 1), self.columns) - 1
        elif final == "A":
            self._row = max(self._row - count, 0)
        elif final == "B":
            self._row = min(self._row + count, self.rows - 1)
        elif final == "C":
            self._column = min(self._column + count, self.columns - 1)
        elif final == "D":
            self._column = max(self._column - count, 0)
        elif final == "G":
            self._column = min(count, self.columns) - 1
        elif final == "d":
            self._row = min(count, self.rows) - 1
        elif final == "J":
            self._cells = [[" "] * self.columns for _ in range(self.rows)]
        elif final == "K":
            for column in range(self._column, self.columns):
                self._cells[self._row][column] = " "


class Terminal:
    """A program in a pseudo-terminal of its own session; `with` ends it."""

    def __init__(self, command: Sequence[str], columns: int, rows: int, more: Mapping[str, str] | None = None) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        environment = {
            **{key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"},  # as installed
            "TERM": "xterm-256color",
            "COLORTERM": "truecolor",
            "LANG": "C.UTF-8",
            **(more or {}),
        }
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.usage = psutil.Process(self.process.pid)
        self.screen, self.bytes_read, self.peak_bytes = Screen(columns, rows), 0, 0

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGHUP)
        deadline = time.monotonic() + 5
        while self.process.poll() is None and time.monotonic() < deadline:
            self.read(0.1)
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)

    def read(self, seconds: float) -> bool:
        """Take what comes within `seconds`; False if nothing did."""
        if not select.select([self._master], [], [], max(seconds, 0.0))[0]:
            return False
        try:
            found = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            time.sleep(min(seconds, 0.05))
            return False
        self.bytes_read += len(found)
        self.screen.feed(found.decode("utf-8", "ignore"))
        return bool(found)

    def run(self, seconds: float, look: Callable[[], None] = lambda: None) -> None:
        """Read on for so long; `look` is called after each piece."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            self.read(min(left, 0.5))
            look()

    def until(self, shown: Callable[[Screen], bool], seconds: float = 30.0) -> float:
        """Seconds until the screen is so. Raises TimeoutError with what it shows instead."""
        begun = time.monotonic()
        while not shown(self.screen):
            if time.monotonic() - begun > seconds or self.process.poll() is not None:
                raise TimeoutError(f"not shown within {seconds:g} s; instead:\n{self.screen.text}")
            self.read(0.05)
        return time.monotonic() - begun

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    @property
    def cpu_seconds(self) -> float:
        """User and system time of the program, its ended children included."""
        return sum(self.usage.cpu_times()[:4])

    @property
    def memory_bytes(self) -> int:
        """Resident now; `peak_bytes` keeps the most that was seen, where the system tells it the true peak."""
        now: int = self.usage.memory_info().rss
        status = Path(f"/proc/{self.process.pid}/status")
        peak = re.search(r"VmHWM:\s+(\d+)", status.read_text()) if status.is_file() else None
        self.peak_bytes = max(self.peak_bytes, now, int(peak[1]) * 1024 if peak else 0)
        return now
