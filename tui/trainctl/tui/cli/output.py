"""The output of the command line: one JSON object, or lines for a person, both safe to show."""

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from trainctl.protocol import errors
from trainctl.protocol.machine.standard_streams import LossyStream
from trainctl.tui.text.ascii import to_ascii

INTERRUPTED = 130
"""The exit code after Ctrl-C: 128 + SIGINT, as a shell says it."""
ERROR_CODES: tuple[tuple[type[errors.TrainctlError], str], ...] = (
    (errors.NotCachedError, "invalid-input"),
    (errors.SeveralInvalidError, "invalid-input"),
    (errors.BusyError, "invalid-input"),
    (errors.DamagedError, "invalid-input"),
    (errors.InvalidInputError, "invalid-input"),
    (errors.RefusedError, "refused"),
    (errors.ExpiredError, "expired"),
    (errors.NotConnectedError, "unreachable"),
    (errors.UnreachableError, "unreachable"),
    (errors.ClosedError, "failed"),
    (errors.NotAuthorisedError, "not-authorised"),
    (errors.VersionError, "version"),
    (errors.ProtocolError, "protocol"),
)
"""The `error.code` of each exception, first match."""


def has_screen() -> bool:
    """Return whether all three standard streams are terminals. The full screen is drawn on standard error."""
    return all(stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr))


def has_color() -> bool:
    """Return whether standard output is a terminal whose user wants colours (https://no-color.org)."""
    return sys.stdout.isatty() and os.environ.get("NO_COLOR") is None


def emit(value: Any) -> None:
    """Print one JSON value on one line of standard output, in UTF-8 whatever the locale."""
    from trainctl.protocol.wire.codec import encode_json  # which every message comes with

    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
    sys.stdout.write(encode_json(value) + "\n")
    sys.stdout.flush()


def emit_ok(**fields: Any) -> None:
    """Print the one object of a `--json` call that succeeded."""
    emit({"ok": True, **fields})


def answer(text: str, *, json: bool, none: str = "", **fields: Any) -> int:
    """Print one object with `json`, else the text, or the note `none` if the text is empty. Returns exit code 0."""
    if json:
        emit_ok(**fields)
    elif text:
        say(text)
    else:
        tell(none)
    return 0


def emit_error(code: str, text: str, problems: Sequence[str] = (), **fields: Any) -> None:
    """Print the one object of a `--json` call that failed; several `problems` are listed in `error.problems`."""
    several = {"problems": [one_line(problem) for problem in problems]} if problems else {}
    emit({"ok": False, "error": {"code": code, "text": one_line(text), **several}, **fields})


def say(text: str) -> None:
    """Print lines on standard output and flush it."""
    sys.stdout.write(f"{shown_on(sys.stdout, text)}\n")
    sys.stdout.flush()


def tell(text: str) -> None:
    """Print a note for people on standard error. Scripts read only standard output."""
    sys.stderr.write(f"{shown_on(sys.stderr, one_line(text))}\n")
    sys.stderr.flush()


@contextlib.contextmanager
def read_to_its_end() -> Iterator[None]:
    """Within, a standard output that is full or has no reader any more raises its error: there is always more to print,
    and it is all that the command does."""
    with sys.stdout.strictly() if isinstance(sys.stdout, LossyStream) else contextlib.nullcontext():
        yield


def complain(text: str) -> None:
    """Print a failure as one line."""
    tell(f"trainctl: {text}")


def error_code(error: errors.TrainctlError) -> str:
    return next((code for kind, code in ERROR_CODES if isinstance(error, kind)), "failed")


def one_line(text: str) -> str:
    """Turn any text into one printable line. Terminal control characters become spaces."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def log_text(text: str, *, raw: bool) -> str:
    """Return a log unchanged (`raw`), or without terminal control characters and colours."""
    if raw:
        return text
    return "".join(char if char.isprintable() or char in "\n\t" else "\n" if char == "\r" else "" for char in text)


def shown_on(stream: TextIO, text: str) -> str:
    """Return text in ASCII where the stream's encoding lacks one of its characters."""
    try:
        text.encode(stream.encoding or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return to_ascii(text)
    return text


TICK_SECONDS = 0.5
SECONDS_CELLS = 12
SLOW_SECONDS = 5.0
"""Seconds after which a program that isn't on a terminal is told what is being done."""
QUIET_SECONDS = 2.0
"""A stage shows its seconds only after so many."""


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


@contextlib.contextmanager
def stage_if_slow(text: str) -> Iterator[None]:
    """Show what is being done as `stage` does; off a terminal only once it has taken a while, so that what fails at
    once is one line."""
    if sys.stderr.isatty():
        with stage(text):
            yield
        return
    timer = threading.Timer(SLOW_SECONDS, tell, (text,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _tick(text: str, stream: TextIO, done: threading.Event) -> None:
    began = time.monotonic()
    while not done.wait(TICK_SECONDS):
        seconds = time.monotonic() - began
        if seconds >= QUIET_SECONDS:
            stream.write(f"\r{text} ... {seconds:.0f} s")
            stream.flush()
