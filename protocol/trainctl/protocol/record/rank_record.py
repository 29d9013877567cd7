"""A rank's record of its own steps: the loop appends a report, a thread of its own writes them to rank-R.db in
groups."""

import contextlib
import logging
import sqlite3
import threading
from collections import deque
from pathlib import Path

from trainctl.protocol.errors import DamagedError, InvalidInputError
from trainctl.protocol.messages import PHASES, RANK_COLUMNS, Report
from trainctl.protocol.record import salvage
from trainctl.protocol.record.schema import (
    RANK_SCHEMA,
    RANK_STEP_COLUMNS,
    REPORTS_KEPT,
    column_value,
    open_for_writing,
    refusal,
    sync_commits,
)
from trainctl.protocol.wire.codec import encode

log = logging.getLogger(__name__)

_GROUP_SECONDS = 0.25
_RETRY_SECONDS = 5.0
_BUSY_MILLISECONDS = 10_000
_GROUP_ROWS = 2000
_KEPT_REPORTS = 1_000_000
"""Reports kept while the disk refuses them; beyond that the oldest are lost."""

_KEEP = "INSERT OR REPLACE INTO reports VALUES (?, ?, ?, ?)"
_FORGET = "DELETE FROM reports WHERE step <= ?"
_INSERT = f"INSERT OR REPLACE INTO rank_steps VALUES ({', '.join('?' * RANK_STEP_COLUMNS)})"  # noqa: S608
Row = tuple[int | float | str | bytes | None, ...]


class MetricsWriter:
    """Owns `path`. `append` is all the training loop pays; a full disk costs no step, only the record until there
    is room."""

    def __init__(self, path: Path, node: str) -> None:
        self._node, self._path = node, path
        self._writing = threading.Lock()
        self._reports: deque[Report] = deque(maxlen=_KEPT_REPORTS)
        try:
            self._connection = self._opened()
        except DamagedError:
            self._connection = self._made_again()
        self._group: list[Report] = []  # the writer thread's own
        self._closing = threading.Event()
        self._said = ""
        self._was_made_again = False
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def _opened(self) -> sqlite3.Connection:
        connection = open_for_writing(self._path, RANK_SCHEMA)
        connection.execute(f"PRAGMA busy_timeout={_BUSY_MILLISECONDS}")
        return connection

    def _made_again(self) -> sqlite3.Connection:
        aside = salvage.rebuild(self._path, RANK_SCHEMA)
        where = f"moved to {aside.name}" if aside is not None else "its file is gone"
        log.warning("%s was damaged: %s, and made again from what could be read of it", self._path, where)
        return self._opened()

    def append(self, report: Report) -> None:
        """Take one train report; returns at once."""
        self._reports.append(report)

    def sync(self) -> None:
        """Write all reports taken so far and have the disk keep them; may be called on any thread. Raises OSError if
        the disk refuses any, which stay in line."""
        if not self._write():
            raise OSError(f"{self._path}: {self._said}")
        sync_commits(self._path)

    def close(self) -> None:
        """Write what is left, once more if the disk refuses, and end the thread."""
        self._closing.set()
        self._thread.join()
        self._connection.close()

    def _run(self) -> None:
        pause = _GROUP_SECONDS
        while not self._closing.wait(pause):
            pause = _GROUP_SECONDS if self._write() else _RETRY_SECONDS
        self._write()

    def _write(self) -> bool:
        """Commit all reports taken so far, in groups; a group that the disk refuses stays first in line."""
        with self._writing:
            return self._write_groups()

    def _write_groups(self) -> bool:
        while self._reports or self._group:
            while self._reports and len(self._group) < _GROUP_ROWS:
                self._group.append(self._reports.popleft())
            try:
                self._commit(self._group)
            except sqlite3.Error as error:
                if not self._is_solved(error):
                    self._say(f"recording of metrics is delayed: {error}")
                    return False
                continue
            self._group, self._was_made_again = [], False
        self._said = ""
        return True

    def _is_solved(self, error: sqlite3.Error) -> bool:
        """Make the record again if it is damaged or was deleted, once until a group is written; return whether that
        worked."""
        if self._was_made_again or not isinstance(refusal(self._path, error), DamagedError):
            return False
        self._was_made_again = True
        self._connection.close()
        with contextlib.suppress(InvalidInputError):
            self._connection = self._made_again()
            return True
        return False

    def _commit(self, group: list[Report]) -> None:
        """Rows of all, and the newest whole, from which the run's record is completed if its writer died."""
        self._connection.execute("BEGIN")
        try:
            self._connection.executemany(_INSERT, [_row(report, self._node) for report in group])
            self._connection.executemany(_KEEP, [_whole(report) for report in group[-REPORTS_KEPT:]])
            self._connection.execute(_FORGET, (group[-1].step - REPORTS_KEPT,))
            self._connection.execute("COMMIT")
        except sqlite3.Error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise

    def _say(self, text: str) -> None:
        if text != self._said:
            log.warning("%s", text)
        self._said = text


def _whole(report: Report) -> Row:
    return report.step, report.generation.term, report.generation.n, encode(report)


def _row(report: Report, node: str) -> Row:
    return (
        report.step, report.rank, report.generation.term, report.generation.n, node,
        column_value(report.own_tokens), report.own_samples, report.micro_batch, report.replays,
        *map(column_value, (report.step_seconds, *(getattr(report.phases, name) for name in PHASES))),
        *(column_value(report.values.get(name)) for name in RANK_COLUMNS), report.finished_at,
        column_value(report.own_weight),
    )  # fmt: skip
