"""Standard input as training data: copied into a growing file, whose end is marked when the input ends.

The run reads the file, so it doesn't notice whether this program is still there.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import IO

from trainctl.protocol.config import run_file, validation_errors
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.record.paths import inputs_directory
from trainctl.tui.commands import targets

_READ_BYTES = 1 << 16


def is_wanted(file: Path, overrides: Mapping[str, str]) -> bool:
    """Return whether a run file, with `table.key` overrides, has standard input as its data. Raises
    InvalidInputError."""
    given = overrides.get("data.path")
    table = validation_errors.read_toml(file, "run file").get("data")
    own = table.get("path") if isinstance(table, dict) else None
    return (own if given is None else given) == run_file.STANDARD_INPUT


def check(source: IO[bytes], address: str, *, local: bool) -> None:
    """Check that standard input can be copied for the agent at `address`. Raises InvalidInputError."""
    if source.isatty():
        raise InvalidInputError(
            "data.path", '"-" is standard input: send it rows, as in: cat rows.jsonl | trainctl run'
        )
    if not local:
        problem = f'"-" needs an agent on this machine; {address} is on another: copy the rows to a file there'
        raise InvalidInputError("data.path", problem)


class InputCopy:
    """A file with the whole lines of an input that have come by now; a thread copies them."""

    def __init__(self, source: IO[bytes], name: str) -> None:
        """`name`: the run's. Raises OSError if there can be no such file."""
        folder = inputs_directory()
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.jsonl"
        self._source, self._file = source, self.path.open("xb")
        self._lock, self._rest, self._ended = threading.Lock(), b"", False
        self.lines, self.begun, self._error = 0, False, ""  # begun: a run trains on it
        self._thread = threading.Thread(target=self._copy, name="input", daemon=True)

    @property
    def overrides(self) -> dict[str, str]:
        """Return what the run file must say to train on it."""
        return {"data.path": str(self.path), "data.growing": "true"}

    def start(self) -> None:
        """Begin to copy."""
        self._thread.start()

    def wait(self) -> None:
        """Until the input has ended. Raises TrainctlError if it could not be copied to its end."""
        self._thread.join()
        if self._error:
            raise TrainctlError(f"{self.path}: {self._error}; the run continues with the first {self.lines:,} lines")

    def end(self) -> bool:
        """Mark the end after the last whole line; what is still to come is left out. Return False if it was marked."""
        with self._lock:
            if self._ended:
                return False
            self._ended = True
            self._file.close()
            run_file.end_mark(self.path).touch()
            return True

    def discard(self) -> None:
        """No run has begun: remove the file."""
        with self._lock:
            self._ended = True
            self._file.close()
            self.path.unlink(missing_ok=True)
            run_file.end_mark(self.path).unlink(missing_ok=True)

    def _copy(self) -> None:
        try:
            while piece := os.read(self._source.fileno(), _READ_BYTES):
                if not self._write(piece):
                    return
            self._write(b"\n" if self._rest else b"")
        except OSError as error:
            self._error = error.strerror or str(error)
        self.end()

    def _write(self, piece: bytes) -> bool:
        """Return whether the file still takes more. Only whole lines are written, so that none is read in part."""
        with self._lock:
            if self._ended:
                return False
            whole, newline, self._rest = (self._rest + piece).rpartition(b"\n")
            self._file.write(whole + newline)
            self._file.flush()
            self.lines += (whole + newline).count(b"\n")
            return True


@contextlib.contextmanager
def copied(
    file: Path | None, overrides: Mapping[str, str], address: str, tell: Callable[[str], None]
) -> Iterator[InputCopy | None]:
    """The growing copy of standard input, if the run file wants that; None if it doesn't. Afterwards its end is marked,
    whatever happened, or it is gone if no run has `begun`. `tell` shows a line. Raises InvalidInputError if there is
    nothing to copy."""
    if file is None or not is_wanted(file, overrides):
        yield None
        return
    check(sys.stdin.buffer, address, local=targets.is_local(address))
    copy = InputCopy(sys.stdin.buffer, file.stem)
    with _signals_end():
        copy.start()
        try:
            yield copy
        finally:
            _finish(copy, tell)


def _finish(copy: InputCopy, tell: Callable[[str], None]) -> None:
    if not copy.begun:
        copy.discard()
    elif copy.end():
        tell(f"input: stopped after {copy.lines:,} lines; the run continues with those; the rest is lost")


@contextlib.contextmanager
def _signals_end() -> Iterator[None]:
    """SIGTERM and SIGHUP end this program as Ctrl-C does; a hang-up that is ignored stays so."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, _: FrameType | None) -> None:
    raise SystemExit(128 + number)
