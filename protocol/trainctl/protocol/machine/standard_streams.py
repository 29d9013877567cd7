"""Standard streams that are closed, full or without a reader: a program that is told to go on does so without them."""

import contextlib
import io
import os
import sys
from typing import TextIO


def open_closed() -> None:
    """Give each standard descriptor that is closed to the null device. The next file that is opened would get it, and
    be written into by whatever prints."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest that is free
        if getattr(sys, name) is None:
            mode = "r" if descriptor == 0 else "w"
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


class LossyStream(io.TextIOBase):
    """A stream that drops what it can't take."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self._stream.flush()

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()
