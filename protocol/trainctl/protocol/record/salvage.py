"""Databases made again from what can be read of damaged or deleted ones."""

import contextlib
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import sync
from trainctl.protocol.record.schema import UNREADABLE, open_for_writing, tables_of

_LOGS: Final = ("", "-wal", "-shm")
"""Suffixes that SQLite adds to a database's name for its other files."""
_TYPES: Final[dict[str, type | tuple[type, ...]]] = {
    "INTEGER": (int, float, str),  # a rank's memory may be any number
    "REAL": (int, float, str),  # NOT_GIVEN and NOT_A_NUMBER stand for numbers
    "TEXT": str,
    "BLOB": bytes,
}


def copy_readable(path: Path, schema: str, complete: Callable[[sqlite3.Connection], None] = lambda _: None) -> Path:
    """Make a new database beside a damaged one, of the rows that can be read of it and what `complete` adds, and return
    its path. Raises InvalidInputError."""
    fresh = path.with_name(f"{path.name}.new")
    try:
        for end in _LOGS:
            Path(f"{fresh}{end}").unlink(missing_ok=True)
        with contextlib.closing(open_for_writing(fresh, schema)) as connection:
            with contextlib.suppress(sqlite3.Error), contextlib.closing(_existing(path)) as damaged:
                copy_rows(damaged, connection, schema)
            complete(connection)
    except (OSError, sqlite3.Error) as error:
        raise InvalidInputError(str(path), f"is damaged and cannot be made again: {error}") from None
    return fresh


def put_in_place(fresh: Path, path: Path, why: str) -> Path | None:
    """Have a database that is closed take the place of another one, which is moved aside, and return where that is;
    None if there was none. Raises InvalidInputError."""
    try:
        aside = move_aside(path, why)
        sync(fresh)
        fresh.replace(path)
        sync(path.parent)
    except OSError as error:
        raise InvalidInputError(str(path), f"cannot be made again: {error.strerror}") from None
    return aside


def rebuild(path: Path, schema: str, complete: Callable[[sqlite3.Connection], None] = lambda _: None) -> Path | None:
    """Make a damaged database again, as above, and return where the damaged one is. Raises InvalidInputError."""
    return put_in_place(copy_readable(path, schema, complete), path, "damaged")


def move_aside(path: Path, why: str) -> Path | None:
    """Rename a database with its log, and return its new path; None if it isn't there. Raises OSError."""
    name = f"{path.name}.{why}-{time.strftime('%Y%m%d-%H%M%S')}"
    taken = len([*path.parent.glob(f"{name}*")])
    aside = path.with_name(f"{name}~{taken}" if taken else name)
    for end in _LOGS:
        with contextlib.suppress(FileNotFoundError):
            Path(f"{path}{end}").replace(f"{aside}{end}")
    return aside if aside.exists() else None


def _existing(path: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{path.resolve().as_uri()}?mode=rw", uri=True, isolation_level=None, timeout=0)


def copy_rows(damaged: sqlite3.Connection, target: sqlite3.Connection, schema: str) -> int:
    """Copy all rows that can be read and have the types of their columns, and return how many. Each table is read
    from both of its ends, for reading stops at a damaged page."""
    copied = 0
    target.execute("BEGIN")
    for table in tables_of(schema):
        columns = target.execute(f"PRAGMA table_info({table})").fetchall()
        keys = [name for _, name, *_, key in sorted(columns, key=lambda column: column[5]) if key] or ["rowid"]
        marks = ", ".join("?" * len(columns))
        insertion = f"INSERT OR IGNORE INTO {table} VALUES ({marks})"  # noqa: S608  names of our schema
        for direction in ("ASC", "DESC"):
            order = ", ".join(f"{key} {direction}" for key in keys)
            for row in _rows(damaged, f"SELECT * FROM {table} ORDER BY {order}"):  # noqa: S608
                if len(row) == len(columns) and all(map(_fits, columns, row)):
                    with contextlib.suppress(sqlite3.IntegrityError):
                        copied += target.execute(insertion, row).rowcount
    target.execute("COMMIT")
    return copied


def _rows(connection: sqlite3.Connection, sql: str) -> Iterator[tuple[Any, ...]]:
    with contextlib.suppress(*UNREADABLE):
        yield from connection.execute(sql)


def _fits(column: tuple[Any, ...], value: Any) -> bool:
    _, _, kind, needed, _, key = column
    return not (needed or key) if value is None else isinstance(value, _TYPES[kind])


def is_sound(connection: sqlite3.Connection) -> bool:
    """Return whether SQLite finds nothing wrong with a database. It reads all of it."""
    with contextlib.suppress(*UNREADABLE):
        return bool(connection.execute("PRAGMA quick_check(1)").fetchall() == [("ok",)])
    return False
