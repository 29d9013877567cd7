"""The agent's own log: `<node folder>/logs/agent.log`, bounded, in the form of all logs; warnings go to standard error
too, where a supervisor keeps them."""

import contextlib
import copy
import logging
import logging.handlers
import os
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Event, Live
from trainctl.protocol.record.log_format import Formatter

LIMIT_BYTES = 5_000_000
KEPT_FILES = 3
"""Older files kept beside the log; agent.log.1 is the newest of them."""
BOOT_LOG_BYTES = 1_000_000
log = logging.getLogger("trainctl.agent")
_LEVELS = {"warning": logging.WARNING, "error": logging.ERROR}


class _OneLine(Formatter):
    """Without the traceback, which is in the log."""

    def format(self, record: logging.LogRecord) -> str:
        bare = copy.copy(record)
        bare.exc_info = bare.exc_text = bare.stack_info = None
        return super().format(bare)


def path(node_directory: Path) -> Path:
    """Where an agent's log is."""
    return node_directory / "logs" / "agent.log"


@contextlib.contextmanager
def kept(node_directory: Path, *, limit_bytes: int = LIMIT_BYTES) -> Iterator[Callable[[], IO[str] | None]]:
    """Have all that is logged kept; gives what gives the file. Raises InvalidInputError if it can't be."""
    file = path(node_directory)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        keeping = logging.handlers.RotatingFileHandler(
            file, maxBytes=limit_bytes, backupCount=KEPT_FILES, encoding="utf-8"
        )
    except OSError as error:
        raise InvalidInputError(str(file), f"the agent cannot write its log there: {error.strerror}") from None
    telling = logging.StreamHandler()
    telling.setLevel(logging.WARNING)
    keeping.setFormatter(Formatter())
    telling.setFormatter(_OneLine())
    for handler in (keeping, telling):
        logging.getLogger().addHandler(handler)
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk is no reason to print tracebacks
    log.setLevel(logging.INFO)
    shorten_boot_log()
    try:
        yield lambda: keeping.stream
    finally:
        logging.captureWarnings(False)
        for handler in (keeping, telling):
            logging.getLogger().removeHandler(handler)
            handler.close()


def heard(message: Live) -> None:
    """Log a published message if it is an event."""
    if isinstance(message, Event):
        where = f"{message.run}: " if message.run else ""
        log.log(_LEVELS.get(message.severity, logging.INFO), "%s%s", where, message.text)


def shorten_boot_log(limit_bytes: int = BOOT_LOG_BYTES) -> None:
    """launchd has standard error in a file that no one rotates: begin it again when it is long."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        known = os.fstat(sys.stderr.fileno())
        if stat.S_ISREG(known.st_mode) and known.st_size > limit_bytes:
            os.ftruncate(sys.stderr.fileno(), 0)
