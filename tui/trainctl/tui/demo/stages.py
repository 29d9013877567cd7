"""The line of something that takes seconds, on standard error: with the seconds so far where that is a terminal."""

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from typing import TextIO

TICK_SECONDS = 0.5
SECONDS_CELLS = 12
QUIET_SECONDS = 2.0
"""What takes no longer needs no seconds."""


@contextlib.contextmanager
def stage(text: str, stream: TextIO | None = None) -> Iterator[None]:
    """Say in one printable line what is being done as long as it is; off a terminal just once, as it begins."""
    stream = stream or sys.stderr
    if not stream.isatty():
        stream.write(f"{text}\n")
        stream.flush()
        yield
        return
    text = text[: shutil.get_terminal_size().columns - SECONDS_CELLS]  # what wraps can't be rewritten
    done = threading.Event()
    ticking = threading.Thread(target=_tick, args=(text, stream, done), name="stage", daemon=True)
    stream.write(text)
    stream.flush()
    ticking.start()
    try:
        yield
    finally:
        done.set()
        ticking.join()
        stream.write("\n")
        stream.flush()


def _tick(text: str, stream: TextIO, done: threading.Event) -> None:
    began = time.monotonic()
    while not done.wait(TICK_SECONDS):
        seconds = time.monotonic() - began
        if seconds >= QUIET_SECONDS:
            stream.write(f"\r{text} ... {seconds:.0f} s")
            stream.flush()
