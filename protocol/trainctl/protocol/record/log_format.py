"""The format of log lines: time in UTC, level and text; lines that libraries print without it stay as they are.

2026-11-20T14:31:05.123Z INFO joined g1.2: 3 ranks by gloo
"""

import datetime
import logging
import re
from typing import NamedTuple

LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORM = re.compile(
    rf"(\d{{4}}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d{{1,6}})?)Z ({'|'.join(LEVELS)}) (.*)", re.ASCII | re.DOTALL
)


class LogLine(NamedTuple):
    """A line taken apart; `at` (Unix seconds) is None and `level` empty for one without the form."""

    at: float | None
    level: str
    text: str


def write(at: float, level: str, text: str) -> str:
    """A line in the form, without its end; what `text` has more lines of stays on lines of its own."""
    when = datetime.datetime.fromtimestamp(at, datetime.UTC)
    return f"{when:%Y-%m-%dT%H:%M:%S}.{when.microsecond // 1000:03d}Z {level} {text}"


def read(line: str) -> LogLine:
    """The parts of a line, whatever it is."""
    found = _FORM.match(line)
    if found is None:
        return LogLine(None, "", line)
    try:
        at = datetime.datetime.fromisoformat(found[1]).replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:  # a thirteenth month
        return LogLine(None, "", line)
    return LogLine(at, found[2], found[3])


class Formatter(logging.Formatter):
    """Gives the records of `logging` the form."""

    def format(self, record: logging.LogRecord) -> str:
        return write(record.created, record.levelname, super().format(record))
