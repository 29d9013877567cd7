"""Standard streams that are closed, full or without a reader: a program goes on without them if asked to."""

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


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


STANDARD_OUTPUT = "standard output"
"""Stands for a file's name in its errors."""
BROKEN_PIPE = 141
"""128 + SIGPIPE, as a shell tells it."""
HUNG_UP = 129
"""128 + SIGHUP."""


def exit_code(lost: OSError) -> int:
    """Return the exit code of a program whose only purpose was what a standard stream did not take."""
    if isinstance(lost, BrokenPipeError):
        return BROKEN_PIPE
    return HUNG_UP if lost.errno == errno.EIO else 1  # EIO: the terminal is gone


def silence(*streams: TextIO) -> None:
    """Discard what is written to streams whose reader has gone, so that their last flush raises no error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with contextlib.suppress(OSError, ValueError):  # it is no file of the system's
            os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


class LossyStream:
    """A stream that drops what it can't take, so that no program ends in the middle of its work.

    In a block of `strictly` it raises the error instead: who follows a run shall end with the reader.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self._name = stream, name
        self._is_strict = False
        self.lost: OSError | None = None
        """The newest error; a disk that was full may take what comes later."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        with self._dropping():
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._dropping():
            self._stream.flush()

    @contextlib.contextmanager
    def strictly(self) -> Iterator[None]:
        before, self._is_strict = self._is_strict, True
        try:
            yield
        finally:
            self._is_strict = before

    @contextlib.contextmanager
    def _dropping(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename, self.lost = self._name, error
            if self._is_strict:
                raise


@contextlib.contextmanager
def lossy_streams() -> Iterator[LossyStream]:
    """Have standard output and error drop what they can't take. Yields standard output."""
    out, err = sys.stdout, sys.stderr
    lossy, lossy_err = LossyStream(out, STANDARD_OUTPUT), LossyStream(err, "standard error")
    sys.stdout, sys.stderr = cast("TextIO", lossy), cast("TextIO", lossy_err)
    try:
        yield lossy
    finally:
        sys.stdout, sys.stderr = out, err
        for own, stream in ((lossy, out), (lossy_err, err)):
            own.flush()
            if own.lost is not None:
                silence(stream)
