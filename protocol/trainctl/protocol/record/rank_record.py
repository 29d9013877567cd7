"""A rank's record of its own steps: the loop appends a report, a thread of its own writes them to rank-R.db in
groups."""

import contextlib
import logging
import sqlite3
import threading
from collections import deque
from pathlib import Path

from trainctl.protocol.errors import DamagedError, InvalidInputError
from trainctl.protocol.messages import PHASES, RANK_COLUMNS, RankStep, Report
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
            rows = [
                rank_row(report, self._node, report.own_tokens, report.own_samples, report.own_weight)
                for report in group
            ]
            self._connection.executemany(_INSERT, rows)
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


def rank_row(
    part: Report | RankStep,
    node: str,
    tokens: float,
    samples: int,
    weight: float | None,
    finished_at: float | None = None,
) -> Row:
    """Return a rank's part of a step as a row of `rank_steps`, in rank-R.db and in the run's record. `finished_at`
    (Unix seconds): of a part that doesn't say when it ended."""
    ended_at = part.finished_at if isinstance(part, Report) else finished_at
    return (
        part.step,
        part.rank,
        part.generation.term,
        part.generation.n,
        node,
        column_value(tokens),
        samples,
        part.micro_batch,
        part.replays,
        *map(column_value, (part.step_seconds, *(getattr(part.phases, name) for name in PHASES))),
        *(column_value(part.values.get(name)) for name in RANK_COLUMNS),
        ended_at,
        column_value(weight),
    )
