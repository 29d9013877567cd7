"""The logs of several nodes merged by time, as one immutable value, and the pure reducers that add what was read.

A line in the protocol's form has a time of its own. One without (a traceback, what a native library prints) stays with
the line before it in the same file. Of lines before the first time in a file only the order is known: they go with the
first that has one, or with when they were read.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from trainctl.protocol.messages import LogPart
from trainctl.protocol.record import log_format

MAX_LINES = 5000
MAX_CHARACTERS = 1000
"""Kept of a line."""
FIRST_BYTES = 131_072
"""Read of a log's end at first."""
PART_BYTES = 65_536
MOST_BEHIND_BYTES = 1_048_576
"""Bytes of a log by which reading may be behind: of one that grows faster the middle is left out, and that is said."""

_ESCAPES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)|[@-Z\\-_])")
_BAD = re.compile(
    r"(error|exception)\b|\b(traceback|fatal|critical|killed|aborted|segmentation fault)\b", re.IGNORECASE
)
_DOUBTFUL = re.compile(r"warn", re.IGNORECASE)


LogKey = tuple[float, int, int]
"""The place of an entry among all: its time in Unix seconds, its rank, and its number in its file, as read."""


@dataclass(frozen=True)
class LogEntry:
    """One line; `stray` is one without a time of its own."""

    at: float
    rank: int
    number: int
    node: str
    level: str  # "INFO", "WARNING", "ERROR", or empty
    text: str
    stray: bool = False

    @property
    def key(self) -> LogKey:
        return self.at, self.rank, self.number


@dataclass(frozen=True)
class LogProgress:
    """The progress of reading a rank's log."""

    offset: int | None = None  # first byte not read; None: nothing was
    rest: str = ""  # of a line whose end isn't there yet
    at: float | None = None  # of the last line that has a time
    lines: int = 0
    behind_bytes: int = 0  # still to be read


@dataclass(frozen=True)
class LogTail:
    """The newest lines of a run's logs, oldest first; `problems` names why a rank's log can't be read now."""

    run: str = ""
    entries: tuple[LogEntry, ...] = ()
    files: Mapping[int, LogProgress] = field(default_factory=lambda: MappingProxyType({}))  # by rank
    problems: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    left_out: int = 0  # lines that were dropped for newer ones
    most: int = MAX_LINES
    most_behind_bytes: float = MOST_BEHIND_BYTES

    def next_offset(self, rank: int) -> int:
        """Return what to ask for: where the last part ended, or the file's end at first and where too much has come
        since."""
        file = self.files.get(rank, LogProgress())
        return -FIRST_BYTES if file.offset is None or file.behind_bytes > self.most_behind_bytes else file.offset


def take(tail: LogTail, node: str, rank: int, part: LogPart, asked_bytes: int, now: float) -> LogTail:
    """Return the tail with a part of a rank's log, asked for with a limit of `asked_bytes`; `now` is Unix seconds."""
    file = tail.files.get(rank, LogProgress())
    if file.offset is not None and part.size_bytes < file.offset:  # its start is asked for next
        return _kept(tail, rank, LogProgress(0, "", None, file.lines), [])
    added: list[str] = []
    text = part.text
    if file.offset is None:
        text = text.partition("\n")[2] if part.offset_bytes > 0 else text
    elif part.offset_bytes > file.offset:
        added.append(f"({part.offset_bytes - file.offset:,} bytes left out)")
        text, file = text.partition("\n")[2], replace(file, rest="")
    *whole, rest = (file.rest + text).split("\n")
    if not text and rest:  # since the last time nothing came: a line without an end is one, too
        whole, rest = [rest], ""
    end = part.end_bytes
    if end is None:
        end = max(part.offset_bytes, min(part.offset_bytes + asked_bytes, part.size_bytes))
    file = replace(file, offset=end, behind_bytes=part.size_bytes - end, rest=rest[-4 * MAX_CHARACTERS :])
    return _kept(tail, rank, file, _entries([*added, *whole], file, node, rank, now))


def from_start(run: str, ranks: Iterable[int], most: int) -> LogTail:
    """Return a tail that reads whole logs, and keeps the newest `most` lines."""
    return LogTail(
        run, files=MappingProxyType({rank: LogProgress(0) for rank in ranks}), most=most, most_behind_bytes=math.inf
    )


def failed(tail: LogTail, rank: int, why: str) -> LogTail:
    """Return the tail with a rank whose log couldn't be read this time."""
    return replace(tail, problems=MappingProxyType({**tail.problems, rank: why}))


def _entries(texts: list[str], file: LogProgress, node: str, rank: int, now: float) -> list[LogEntry]:
    read = [log_format.read(_visible(text)) for text in texts]
    at = file.at
    if at is None:
        at = next((line.at for line in read if line.at is not None), now)
    entries = []
    for number, line in enumerate(read, file.lines):
        at = line.at if line.at is not None else at
        sounds = "ERROR" if _BAD.search(line.text) else "WARNING" if _DOUBTFUL.search(line.text) else ""
        level = line.level or sounds
        entries.append(LogEntry(at, rank, number, node, level, line.text[:MAX_CHARACTERS], line.at is None))
    return entries


def _visible(text: str) -> str:
    """Return what a terminal would show of a line: after its last return, without colours."""
    return _ESCAPES.sub("", text.rstrip("\r").rpartition("\r")[2]).expandtabs(4).rstrip()


def _kept(tail: LogTail, rank: int, file: LogProgress, made: list[LogEntry]) -> LogTail:
    newest = next((entry.at for entry in reversed(made) if not entry.stray), file.at)
    file = replace(file, at=newest, lines=file.lines + len(made))
    made = [entry for entry in made if entry.text]
    problems = MappingProxyType({other: why for other, why in tail.problems.items() if other != rank})
    files = MappingProxyType({**tail.files, rank: file})
    if not made:
        return replace(tail, files=files, problems=problems)
    entries = _merged(tail.entries, made)
    over = max(len(entries) - tail.most, 0)
    return replace(tail, files=files, problems=problems, entries=entries[over:], left_out=tail.left_out + over)


def _merged(entries: tuple[LogEntry, ...], made: list[LogEntry]) -> tuple[LogEntry, ...]:
    made = sorted(made, key=lambda entry: entry.key)
    if not entries or entries[-1].key < made[0].key:
        return (*entries, *made)
    return tuple(sorted((*entries, *made), key=lambda entry: entry.key))
