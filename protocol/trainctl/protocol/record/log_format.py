"""The format of log lines: time in UTC, level and text; lines that libraries print without it stay as they are.

2026-11-20T14:31:05.123Z INFO joined g1.2: 3 ranks by gloo
"""

import codecs
import datetime
import logging
import os
import re
from io import BufferedIOBase
from typing import BinaryIO, NamedTuple

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


def read_part(stream: BinaryIO | BufferedIOBase, offset: int, limit: int) -> tuple[int, int, int, str]:
    """Return a part of a file from `offset` (negative: from its end) with at most `limit` bytes: its first byte, the
    one after its last, the file's size, and the text. No character is divided at either end; a piece of one within
    the file that is all of the part becomes a replacement character."""
    size = os.fstat(stream.fileno()).st_size
    start = max(0, size + offset) if offset < 0 else min(offset, size)
    stream.seek(start)
    body = stream.read(limit)
    skipped = next((number for number, byte in enumerate(body[:4]) if byte & 0xC0 != 0x80), 0) if start else 0
    text, used = codecs.utf_8_decode(body[skipped:], "replace", False)
    if not used and body and start + len(body) < size:  # at the end, the rest of a character may be still to come
        skipped, text, used = 0, body.decode("utf-8", "replace"), len(body)
    return start + skipped, start + skipped + used, size, text
