"""The file of a run's record, as its one writer has it open: made again where it was deleted or is damaged, with a file
beside it that keeps room on the disk."""

import contextlib
import os
import shutil
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainctl.protocol.errors import DamagedError
from trainctl.protocol.record import salvage
from trainctl.protocol.record.schema import (
    RUN_SCHEMA,
    open_for_reading,
    open_for_writing,
    refusal,
    refusing_damage,
    set_durable,
)

LOOK_SECONDS = 0.5
"""Seconds between looks at whether the record's files are still there."""
SAID_SECONDS = 5.0
"""Seconds for which `said` is that the record was made again."""
REBUILD_SECONDS = 60.0
"""Least seconds between two times that a damaged record is made again."""
BALLAST_BYTES = 4 * 1024 * 1024
"""Bytes to which SQLite's log grows before it is merged into the database, so that unfinished work fits."""


class RecordFile:
    """All but `rows` belongs to the writer's thread. Raises InvalidInputError if the record cannot be used."""

    def __init__(self, path: Path, complete: Callable[[sqlite3.Connection], None]) -> None:
        """`complete` adds what is known elsewhere to a record that is made again."""
        self._path, self._log, self._complete = path, path.with_name(f"{path.name}-wal"), complete
        self._said, self._said_until = "", 0.0
        self._rebuilt_monotonic = -REBUILD_SECONDS
        self._reading = threading.Lock()
        self.connection = self._reader = sqlite3.connect(":memory:")
        try:
            self._open()
        except DamagedError:
            self._make_again()
        self.ballast = Ballast(path.with_suffix(".ballast"))

    def _open(self) -> None:
        self.connection, self._is_durable = open_for_writing(self._path, RUN_SCHEMA), False
        with contextlib.ExitStack() as undo:
            undo.callback(self.connection.close)
            self._reader = open_for_reading(self._path)
            undo.pop_all()
        self._inodes, self._looked_monotonic = self._look(), time.monotonic()

    def rows(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        """Read what is written. Raises InvalidInputError."""
        with self._reading, refusing_damage(self._path):
            return self._reader.execute(sql, values).fetchall()

    def set_durable(self, durable: bool) -> None:
        """Choose, outside a transaction, what the next commits survive."""
        if durable != self._is_durable:
            set_durable(self.connection, durable)
            self._is_durable = durable

    @property
    def said(self) -> str:
        """Return what was done to the record just now; empty if nothing was."""
        return self._said if time.monotonic() < self._said_until else ""

    def close(self) -> None:
        self._close_connections()
        self.ballast.release()

    def _close_connections(self) -> None:
        with self._reading, contextlib.suppress(sqlite3.Error):
            self._reader.close()
            self.connection.close()

    # ------------------------------------------------------------ lost and damaged files

    def look(self, *, now: bool = False) -> None:
        """Write the record again if its files aren't there, by a look now and then, or `now`."""
        if now or time.monotonic() >= self._looked_monotonic + LOOK_SECONDS:
            self._looked_monotonic = time.monotonic()
            if self._look() != self._inodes:
                self._write_again()

    def restore(self) -> None:
        """Make a record usable that can't be read or written: its files are gone, or it is damaged."""
        if self._look() != self._inodes:
            self._write_again()
        else:
            self.rebuild()

    def _look(self) -> tuple[int | None, int | None]:
        return _inode(self._path), _inode(self._log)

    def _write_again(self) -> None:
        """Write the whole record where its files were deleted: what is open here still has all of it."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.unlink(missing_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(fresh)) as target:
                self.connection.backup(target)
        except sqlite3.Error as error:
            if not isinstance(refused := refusal(self._path, error), DamagedError):
                raise refused from None
            self.rebuild()
            return
        self._close_connections()
        aside = salvage.put_in_place(fresh, self._path, "replaced")
        self._open()
        moved = f"; what was in its place is now {aside.name}" if aside is not None else ""
        self._say(f"its files were deleted or replaced while the run used them; written again{moved}")

    def rebuild(self) -> None:
        """Make the record again from what can be read of it. Raises InvalidInputError, also if that was done just
        now."""
        now = time.monotonic()
        if now < self._rebuilt_monotonic + REBUILD_SECONDS:
            raise DamagedError(str(self._path), "is damaged again; check the disk")
        self._rebuilt_monotonic = now
        self._make_again()

    def _make_again(self) -> None:
        fresh = salvage.copy_readable(self._path, RUN_SCHEMA, self._complete)
        self._close_connections()
        aside = salvage.put_in_place(fresh, self._path, "damaged")
        self._open()
        where = f"moved to {aside.name}" if aside is not None else "its file is gone"
        self._say(f"was damaged; {where}, and made again from what could be read of it")

    def _say(self, text: str) -> None:
        self._said, self._said_until = f"{self._path}: {text}", time.monotonic() + SAID_SECONDS


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


class Ballast:
    """A file that only takes up space, which is freed when the disk is full; taken only while the disk has four times
    its size left."""

    def __init__(self, path: Path, size_bytes: int = BALLAST_BYTES) -> None:
        self._path, self._size = path, size_bytes
        self.take()

    def take(self) -> None:
        """Take up the room, if there is enough left."""
        if self._path.exists():
            return
        try:
            if shutil.disk_usage(self._path.parent).free >= 4 * self._size:
                # Random bytes: a file system that compresses would keep no room behind zeros.
                self._path.write_bytes(os.urandom(self._size))
        except OSError:
            self.release()

    def release(self) -> bool:
        """Give the room back; False if there was none."""
        try:
            self._path.unlink()
        except OSError:
            return False
        return True
