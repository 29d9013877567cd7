"""`python tools/setup_venv.py VENV EXTRA`: makes a virtual environment and installs this checkout there with an extra.

A line a stage on standard error, with the seconds so far where that is a terminal; what the tools say goes to
VENV/setup.log. Running it again continues where it was interrupted. It needs nothing but Python.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

TICK_SECONDS, PLAIN_TICK_SECONDS = 0.5, 15.0
TOLD_LINES = 15
"""Of the log, where a stage fails."""
_NOISE = re.compile(r"^\s*(WARNING|DEPRECATION|\[notice\]|Looking in|Requirement already)")
_DOWNLOADING = re.compile(r"Downloading (?:\S*/)?(\w+-[\d.]+\d[\w+]*)\S*(?: (\(.*\)))?")
_DOING = ("Downloading ", "Building ", "Preparing ", "Installing ")


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status; 1 where a stage failed."""
    parser = argparse.ArgumentParser(description="Install this checkout into a virtual environment.")
    parser.add_argument("venv", type=Path)
    parser.add_argument("extra")
    given = parser.parse_args(arguments)
    log = given.venv / "setup.log"
    given.venv.mkdir(parents=True, exist_ok=True)
    log.write_bytes(b"")
    sys.stderr.write(f"{size_of(given.venv)}\n")
    python, make = given.venv / "bin" / "python", [sys.executable, "-m", "venv", str(given.venv)]
    if not (given.venv / "bin" / "pip").exists() and not run_stage(f"making {given.venv}", make, log):
        return 1
    options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off", "-c", "constraints.txt"]
    command = [str(python), "-m", "pip", "install", *options, "-e", "./protocol", "-e", f".[{given.extra}]"]
    return 0 if run_stage(f"installing trainctl[{given.extra}] into {given.venv}", command, log) else 1


def size_of(venv: Path, system: str = sys.platform) -> str:
    """What a person should know of the download before it begins."""
    if any(venv.glob("lib/python*/site-packages/torch")):
        return "setup: PyTorch is already installed; at most 0.5 GB remains to download"
    if system == "linux":
        return (
            "setup: may download 3 GB or more and use 8 GB of disk space: PyTorch for Linux includes CUDA\n"
            f"setup: press Ctrl-C to stop; a CPU-only PyTorch (0.2 GB) already in {venv} is kept"
        )
    return "setup: downloads about 0.5 GB, mostly PyTorch and MLX; press Ctrl-C to stop"


def run_stage(title: str, command: Sequence[str], log: Path, stream: TextIO = sys.stderr) -> bool:
    """Run a command with a line about it that goes on as it does; whether it ended well. If not, what it said last and
    what to do is printed."""
    began, lines = time.monotonic(), Progress(title, stream)
    start = log.stat().st_size
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
    try:
        while True:
            try:
                status = process.wait(TICK_SECONDS)
                break
            except subprocess.TimeoutExpired:
                lines.tick(time.monotonic() - began, doing(log, start))
    except KeyboardInterrupt:
        process.wait()
        lines.end(f"stopped after {time.monotonic() - began:.0f} s; run the same command to continue")
        raise SystemExit(130) from None
    lines.end(f"{'done' if status == 0 else 'failed'} in {time.monotonic() - began:.0f} s")
    if status != 0:
        for line in told(log, start):
            stream.write(f"  {line}\n")
        stream.write(
            f"setup: the full log is {log}. Fix the problem and run the same command again, or run make clean first\n"
        )
    return status == 0


def doing(log: Path, start: int) -> str:
    """The newest thing that the log says is being done, "" for none."""
    lines = [line.strip() for line in _tail(log, start).splitlines()]
    newest = next((line for line in reversed(lines) if line.startswith(_DOING)), "")
    download = _DOWNLOADING.match(newest)
    return f"downloading {download[1]} {download[2] or ''}".strip() if download else newest.split(":")[0].lower()


def told(log: Path, start: int) -> list[str]:
    """The last lines of a stage that failed: its errors, or without any what there is, without warnings."""
    kept = [line for line in _tail(log, start).splitlines() if line.strip() and not _NOISE.match(line)]
    errors = next((index for index, line in enumerate(kept) if re.match(r"\s*(ERROR|error)\b", line)), None)
    return kept[errors:][:TOLD_LINES] if errors is not None else kept[-TOLD_LINES:]


def _tail(log: Path, start: int, most: int = 100_000) -> str:
    with log.open("rb") as file:
        file.seek(max(start, log.stat().st_size - most))
        return file.read().decode("utf-8", "replace")


class Progress:
    """The line of a stage: rewritten in place on a terminal, else printed at the start, seldom, and at the end."""

    def __init__(self, title: str, stream: TextIO) -> None:
        self._title, self._stream, self._due = f"setup: {title}", stream, PLAIN_TICK_SECONDS
        self._live = stream.isatty()
        self._show(f"{self._title} ...")

    def tick(self, seconds: float, doing: str) -> None:
        """So much time has passed."""
        text = f"{self._title} ... {seconds:.0f} s{f', {doing}' if doing else ''}"
        if self._live:
            self._show(text)
        elif seconds >= self._due:
            self._due = seconds + PLAIN_TICK_SECONDS
            self._show(text)

    def end(self, outcome: str) -> None:
        self._show(f"{self._title}: {outcome}")
        if self._live:
            self._stream.write("\n")
            self._stream.flush()

    def _show(self, text: str) -> None:
        if self._live:
            self._stream.write(f"\r\033[K{text[: _columns(self._stream) - 1]}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()


def _columns(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except OSError:
        return 80


if __name__ == "__main__":
    sys.exit(main())
