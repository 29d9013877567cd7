"""The record: the SQLite files of a run directory and of an agent, their schema and how they are opened.

`record.db` has one writer, the agent; `rank-R.db` has one writer, that trainer. A reader opens read-only and holds no
transaction longer than a query.
"""

import contextlib
import math
import os
import re
import sqlite3
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.errors import BusyError, DamagedError, InvalidInputError
from trainctl.protocol.files.durable_files import sync

_DAMAGED: Final = "restore the record from a copy, or move the run directory elsewhere"
"""Advice about a record that cannot be read."""
SCHEMA_VERSION: Final = 2
"""Version of what is read and written: 0.2.0's. 0.1.0 wrote schema 1."""
_PLAUSIBLE_VERSION: Final = 1000
NOT_GIVEN: Final = ""
"""Stands in `steps` for a loss or gradient norm that was not given: NULL, there, is a NaN."""
NOT_A_NUMBER: Final = "NaN"
"""Stands for a NaN in all other columns of numbers: SQLite would keep it as NULL, which is a value not given."""
ROLLUP_LEVELS: Final = (10, 100, 1000)
"""Bucket sizes in steps for which min, max, mean and last are kept."""
VALUES_KEPT: Final = 20_000
"""Newest steps whose `metric_values` are kept, counted, whatever their numbers; their rollups stay forever."""
VALUES_FROM: Final = "values_from"
"""Key in `meta` of the first step whose `metric_values` are kept; absent while none are gone."""

_RANK_STEPS = """
CREATE TABLE IF NOT EXISTS rank_steps (
  step INTEGER NOT NULL, rank INTEGER NOT NULL, term INTEGER NOT NULL, n INTEGER NOT NULL, node TEXT NOT NULL,
  tokens REAL NOT NULL, samples INTEGER NOT NULL, micro_batch INTEGER, replays INTEGER NOT NULL,
  step_seconds REAL NOT NULL, data_seconds REAL NOT NULL, forward_seconds REAL NOT NULL,
  backward_seconds REAL NOT NULL, sync_seconds REAL NOT NULL, optimizer_seconds REAL NOT NULL,
  wait_seconds REAL NOT NULL, memory_bytes INTEGER, memory_peak_bytes INTEGER, memory_cap_bytes INTEGER,
  finished_at REAL NOT NULL, weight REAL,
  PRIMARY KEY (step, rank, term, n)
) WITHOUT ROWID;
"""
RANK_STEP_COLUMNS: Final = 21

RUN_SCHEMA: Final = (
    """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS plans (
  seq INTEGER NOT NULL, term INTEGER NOT NULL, n INTEGER NOT NULL, kind TEXT NOT NULL, step INTEGER NOT NULL,
  plan_version INTEGER NOT NULL, cursor INTEGER NOT NULL, journaled_at REAL NOT NULL,
  body BLOB NOT NULL,                      -- the StepPlan as sent
  PRIMARY KEY (term, n, seq)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS steps (
  step INTEGER NOT NULL, term INTEGER NOT NULL, n INTEGER NOT NULL, committed_at REAL NOT NULL,
  loss REAL, weight REAL, samples INTEGER NOT NULL, learning_rate REAL, grad_norm REAL,
  cursor INTEGER, global_batch INTEGER, plan_version INTEGER NOT NULL,
  step_seconds REAL NOT NULL, tokens_total REAL NOT NULL, skipped TEXT,
  retracted INTEGER NOT NULL DEFAULT 0,    -- 1: only lost ranks had committed it; a redo follows
  tokens REAL, weight_total REAL, seconds_total REAL,
  PRIMARY KEY (step, term, n)
) WITHOUT ROWID;
"""
    + _RANK_STEPS
    + """
CREATE TABLE IF NOT EXISTS evaluations (
  step INTEGER NOT NULL, at REAL NOT NULL, loss REAL, weight REAL NOT NULL, seconds REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS evaluation_values (
  metric TEXT NOT NULL, step INTEGER NOT NULL, at REAL NOT NULL, value REAL,
  PRIMARY KEY (metric, step, at)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS held_out_pairs (
  step INTEGER NOT NULL, at REAL NOT NULL,
  body BLOB NOT NULL,                      -- the KeptPairs as sent
  PRIMARY KEY (step, at)
);
CREATE TABLE IF NOT EXISTS samples (       -- the model's answers to prompts
  at REAL NOT NULL, number INTEGER NOT NULL, step INTEGER NOT NULL,
  body BLOB NOT NULL,                      -- the Sample as sent
  UNIQUE (at, number)
);
CREATE TABLE IF NOT EXISTS drifts (        -- how far a rank's parameters were from those it was given
  rank INTEGER NOT NULL, step INTEGER NOT NULL, at REAL NOT NULL, drift REAL,
  PRIMARY KEY (rank, step, at)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS events (
  id INTEGER PRIMARY KEY, at REAL NOT NULL, kind TEXT NOT NULL, severity TEXT NOT NULL, by TEXT NOT NULL,
  text TEXT NOT NULL, step INTEGER, term INTEGER, n INTEGER, command TEXT, verb TEXT, before TEXT, after TEXT,
  outcome TEXT,
  data BLOB,                               -- as sent; null: 0.2.0 upgraded the record from schema 1
  undoes TEXT
);
CREATE TABLE IF NOT EXISTS host (
  at REAL NOT NULL, node TEXT NOT NULL, cpu_percent REAL, memory_used_bytes INTEGER, disk_free_bytes INTEGER,
  body BLOB NOT NULL                       -- the HostReading as sent
);
CREATE TABLE IF NOT EXISTS metric_names (id INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE);
CREATE TABLE IF NOT EXISTS metric_values ( -- of metrics without a column, of steps that stand: the newest ones
  step INTEGER NOT NULL, rank INTEGER NOT NULL,      -- rank -1: of the run
  present BLOB NOT NULL, body BLOB NOT NULL,         -- which metrics, and their values: see packed_values
  PRIMARY KEY (rank, step)                 -- so that a chart finds a rank's side by side
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rollups (
  metric TEXT NOT NULL, rank INTEGER NOT NULL,       -- rank -1: of the run
  bucket_steps INTEGER NOT NULL, bucket INTEGER NOT NULL, count INTEGER NOT NULL,
  minimum REAL NOT NULL, maximum REAL NOT NULL, mean REAL NOT NULL, last REAL NOT NULL,
  PRIMARY KEY (metric, rank, bucket_steps, bucket)
) WITHOUT ROWID;
"""
)
"""Schema of a run's `record.db`."""

REPORTS_KEPT: Final = 64
"""Newest train reports in `rank-R.db`: more than can be under way when agent and trainer are lost together."""

RANK_SCHEMA: Final = (
    _RANK_STEPS
    + """
CREATE TABLE IF NOT EXISTS reports (
  step INTEGER NOT NULL, term INTEGER NOT NULL, n INTEGER NOT NULL,
  body BLOB NOT NULL,                      -- the Report as sent
  PRIMARY KEY (step, term, n)
) WITHOUT ROWID;
"""
)
"""Schema of a run's `rank-R.db`."""

AGENT_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS commands (
  id TEXT PRIMARY KEY, digest TEXT NOT NULL, verb TEXT NOT NULL, args TEXT NOT NULL, by TEXT NOT NULL, run TEXT,
  node TEXT, if_plan INTEGER, received_at REAL NOT NULL, ttl_seconds REAL NOT NULL, state TEXT NOT NULL,
  step INTEGER, reason TEXT NOT NULL DEFAULT '', field TEXT, before TEXT, after TEXT, ended_at REAL,
  plan_version INTEGER, undoes TEXT
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS runs (
  run TEXT PRIMARY KEY, name TEXT NOT NULL, directory TEXT NOT NULL, started_at REAL NOT NULL, state TEXT NOT NULL,
  reason TEXT NOT NULL DEFAULT '', kind TEXT NOT NULL DEFAULT 'hosted'
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS followed (      -- those of the runs that another node's agent conducts
  run TEXT PRIMARY KEY, rank INTEGER NOT NULL, lead TEXT NOT NULL, address TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS refusals (      -- who was refused what: the newest
  id INTEGER PRIMARY KEY, first_at REAL NOT NULL, last_at REAL NOT NULL, count INTEGER NOT NULL, name TEXT NOT NULL,
  key TEXT NOT NULL, what TEXT NOT NULL, why TEXT NOT NULL, address TEXT NOT NULL
);
"""
"""Schema of `agent.db`."""


def column_value(value: float | None) -> float | str | None:
    """Return a number as a column keeps it in which NULL is a value not given."""
    return NOT_A_NUMBER if value is not None and math.isnan(value) else value


def open_for_writing(path: Path, schema: str, *, durable: bool = False) -> sqlite3.Connection:
    """Return the one writer's connection, in WAL mode and autocommit (the caller says BEGIN and COMMIT). It never waits
    for another process's lock, and needs none where the database has its tables. With `durable` each commit survives
    a power cut (synchronous=FULL); without, it survives the process. Raises BusyError, DamagedError, or
    InvalidInputError if the file is of another schema or the disk fails."""
    was_there = path.exists()
    with _opened(path, str(path), timeout=0) as connection:
        if sys.platform == "darwin":
            connection.execute("PRAGMA fullfsync=1")
            connection.execute("PRAGMA checkpoint_fullfsync=1")
        if not was_there or not _is_complete(connection, schema):
            connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(schema)
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        if not was_there:
            connection.execute("PRAGMA wal_checkpoint")  # a database whose log is lost has its tables, at least
        set_durable(connection, durable)
        _sync_names(path)
        return connection


def tables_of(schema: str) -> tuple[str, ...]:
    """Return the names of the tables that a schema makes."""
    return tuple(re.findall(r"CREATE TABLE IF NOT EXISTS (\w+)", schema))


def _is_complete(connection: sqlite3.Connection, schema: str) -> bool:
    """Return whether nothing has to be written before the database can be used."""
    (mode,) = connection.execute("PRAGMA journal_mode").fetchone()
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    return mode == "wal" and version == SCHEMA_VERSION and names.issuperset(tables_of(schema))


def _sync_names(path: Path) -> None:
    """Have the disk keep the names of a database and of its log, which SQLite makes again at each opening."""
    try:
        sync(path.parent)
    except OSError as error:
        raise InvalidInputError(str(path), f"cannot be kept by its disk: {error.strerror}") from None


def sync_commits(path: Path) -> None:
    """Have the disk keep all that any process has committed to a database in WAL mode. What isn't in its log any more
    is on the disk already: SQLite syncs the database before it begins the log again. No file of the database itself is
    opened, for closing one would end the locks of this process. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):  # it was closed, with all of its log in the database
        sync(path.with_name(f"{path.name}-wal"))


def set_durable(connection: sqlite3.Connection, durable: bool) -> None:
    """Choose, outside a transaction, what the next commits survive."""
    connection.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")


def open_for_reading(path: Path) -> sqlite3.Connection:
    """A read-only connection, which threads may take turns at. Raises InvalidInputError if there is no such record or
    it is of another schema."""
    if not path.is_file():
        raise InvalidInputError(str(path), "no such record")
    with _opened(path, f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=5) as connection:
        return connection


UNREADABLE: Final = (sqlite3.Error, ValueError, TypeError, LookupError, OverflowError, struct.error)
"""Errors by which damage shows: SQLite's own, and those of decoding a value that isn't what was written."""


def refusal(path: Path, error: Exception) -> InvalidInputError:
    """Return an error of a database as one of three: BusyError with the process that holds the lock, InvalidInputError
    where the disk refuses, else DamagedError with what to do."""
    code = getattr(error, "sqlite_errorcode", None)
    if is_busy(error):
        return BusyError(str(path), f"locked by {lock_holder(path)}; it is used again once that lets go of it")
    if code == sqlite3.SQLITE_READONLY_DBMOVED:
        return DamagedError(str(path), "its file was deleted or replaced")
    if code is not None and code & 0xFF in _DISK and code != sqlite3.SQLITE_IOERR_SHORT_READ:
        return InvalidInputError(str(path), f"the disk refuses it: {error}")
    first_line = str(error).partition("\n")[0]  # SQLite may quote a whole table
    return DamagedError(str(path), f"cannot be read: {first_line}; {_DAMAGED}")


def is_busy(error: Exception) -> bool:
    """Return whether an error of a database is another process's lock."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


_DISK = frozenset(
    {
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_NOMEM,
    }
)


def lock_holder(path: Path) -> str:
    """Return the process that has a database locked, as `process 123 (sqlite3)`, or that it can't be found. The
    database's own files aren't opened: closing one would end the locks of this process."""
    import psutil  # takes some 20 ms, and is seldom needed

    found = _lock_owner(path) or next(_other_users(path), None)
    if found is None:
        return "another process"
    with contextlib.suppress(psutil.Error):
        return f"process {found} ({psutil.Process(found).name()})"
    return f"process {found}"


def _lock_owner(path: Path) -> int | None:
    inodes = set()
    for file in (path.with_name(f"{path.name}-shm"), path):
        with contextlib.suppress(OSError):
            inodes.add(file.stat().st_ino)
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/locks").read_text("ascii").splitlines():
            fields = line.split()
            if len(fields) == 8 and fields[3] == "WRITE" and int(fields[5].rpartition(":")[2]) in inodes:
                pid = int(fields[4])
                if pid > 0 and pid != os.getpid():
                    return pid
    return None


def _other_users(path: Path) -> Iterator[int]:
    """Processes of this user that have the database open, where the system doesn't say who has locked it."""
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and any(file.path == str(path.resolve()) for file in process.open_files()):
                yield process.pid


@contextlib.contextmanager
def refusing_damage(path: Path, *errors: type[Exception]) -> Iterator[None]:
    """Raise BusyError, DamagedError or InvalidInputError for what SQLite says about the record at `path`; DamagedError
    also for `errors`, which a value in it raises as it is decoded."""
    damage: tuple[type[Exception], ...] = (sqlite3.DatabaseError, UnicodeDecodeError, *errors)
    try:
        yield
    except damage as error:
        raise refusal(path, error) from None


@contextlib.contextmanager
def _opened(path: Path, address: str, **options: Any) -> Iterator[sqlite3.Connection]:
    """A connection in autocommit to a database of this schema, or a new one. It stays open unless the block fails."""
    try:
        connection = sqlite3.connect(address, isolation_level=None, check_same_thread=False, **options)
    except sqlite3.OperationalError as error:
        raise InvalidInputError(str(path), f"cannot be opened: {error}") from None
    with contextlib.ExitStack() as unless_usable:
        unless_usable.callback(connection.close)
        with refusing_damage(path):
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if not 0 <= version <= _PLAUSIBLE_VERSION:
                raise DamagedError(str(path), f"cannot be read: its schema is {version}; {_DAMAGED}")
            if version > SCHEMA_VERSION:
                raise InvalidInputError(
                    str(path), f"schema {version} is newer than this program's {SCHEMA_VERSION}; upgrade trainctl"
                )
            if 0 < version < SCHEMA_VERSION:  # 0: a new file
                problem = f"schema {version} is older than this program's {SCHEMA_VERSION}"
                advice = "use trainctl 0.2.0 to export or upgrade it, or move it elsewhere to start without it"
                raise InvalidInputError(str(path), f"{problem}; {advice}")
            yield connection
        unless_usable.pop_all()
