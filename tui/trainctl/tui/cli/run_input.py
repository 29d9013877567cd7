"""Standard input as a run's data, as `trainctl run` reads it: to its end, or until this program is interrupted."""

import contextlib
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType

from trainctl.tui.cli import output
from trainctl.tui.commands import targets
from trainctl.tui.setup import standard_input
from trainctl.tui.setup.standard_input import InputCopy


@contextlib.contextmanager
def copied(file: Path | None, overrides: Mapping[str, str], address: str) -> Iterator[InputCopy | None]:
    """The growing copy of standard input, if the run file wants that; None if it doesn't. Afterwards its end is marked,
    whatever happened, or it is gone if no run has `begun`. Raises InvalidInputError if there is nothing to copy."""
    if file is None or not standard_input.is_wanted(file, overrides):
        yield None
        return
    standard_input.check(sys.stdin.buffer, address, local=targets.is_local(address))
    copy = InputCopy(sys.stdin.buffer, file.stem)
    with _signals_end():
        copy.start()
        try:
            yield copy
        finally:
            _finish(copy)


def _finish(copy: InputCopy) -> None:
    if not copy.begun:
        copy.discard()
    elif copy.end():
        output.tell(f"input: stopped after {copy.lines:,} lines; the run goes on with those, the rest is lost")


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
