"""The one writer of a record: a thread that executes writes in their order, so that no lock and no disk holds up the
agent's event loop.

A write that can't be done now stays first in line. If another process has the record locked, or the disk is full, it is
tried again until that has passed. A record that is damaged or was deleted is made again.
"""

import asyncio
import atexit
import contextlib
import sqlite3
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from trainctl.node_agent.records.ballast import Ballast
from trainctl.node_agent.records.statements import Write
from trainctl.protocol.errors import BusyError, DamagedError, InvalidInputError
from trainctl.protocol.record import salvage
from trainctl.protocol.record.schema import (
    RUN_SCHEMA,
    UNREADABLE,
    is_busy,
    open_for_reading,
    open_for_writing,
    refusal,
    refusing_damage,
    set_durable,
)

RETRY_SECONDS = 5.0
"""Seconds until what the disk has refused is tried again."""
BUSY_RETRY_SECONDS = 0.1
BUSY_SECONDS = 2.0
"""Seconds for which a plan waits for another process's lock before it is passed on, and the lock is reported."""
CLOSE_SECONDS = 60.0
"""Seconds for which a closed record waits for another process's lock, in the background."""
LOOK_SECONDS = 0.5
"""Seconds between looks at whether the record's files are still there."""
SAID_SECONDS = 5.0
"""Seconds for which `problem` says that the record was made again."""
WAITING_WRITES = 20_000
"""Most writes kept in memory. Beyond it the oldest are lost, and `problem` counts them."""
WRITES_AT_ONCE: Final = 500
REBUILD_SECONDS = 60.0
"""Least seconds between two times that a damaged record is made again."""
REPEATED_WRITES: Final = 1000
"""Newest writes that are done again in a record that was made again from a damaged one."""

_WRONG = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)


class RecordWriter:
    """Open until it is closed. All but `settled` may be called on any thread."""

    def __init__(self, path: Path, complete: Callable[[sqlite3.Connection], None] = lambda _: None) -> None:
        """`complete` adds what other files know to a record that is made again. Raises InvalidInputError."""
        self._path, self._complete = path, complete
        self._said, self._said_until = "", 0.0
        self._rebuilt_monotonic = -REBUILD_SECONDS
        self._newest: deque[Write] = deque(maxlen=REPEATED_WRITES)
        self._reading = threading.Lock()
        self._connection = self._reader = sqlite3.connect(":memory:")
        try:
            self._open()
        except DamagedError:
            self._make_again()
        self._ballast = Ballast(path.with_suffix(".ballast"))
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Write, bool]] = deque()
        self._given = self._settled = 0  # counts of writes
        self._waiters: list[tuple[int, Callable[[], object]]] = []
        self._lost = 0
        self._refusal: InvalidInputError | None = None
        self._refused_monotonic = self._retry_monotonic = 0.0
        self._wrong: BaseException | None = None
        self._ends_monotonic: float | None = None
        self._is_damaged = False  # as a reader has found
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"record {path.parent.name}", daemon=True)
        self._thread.start()

    def _open(self) -> None:
        self._connection = open_for_writing(self._path, RUN_SCHEMA)
        with contextlib.ExitStack() as undo:
            undo.callback(self._connection.close)
            self._reader = open_for_reading(self._path)
            undo.pop_all()
        self._inodes = self._look()

    # ------------------------------------------------------------ the owner's side

    def put(self, write: Write, *, durable: bool = False) -> None:
        """Take a write; `durable`: it survives a power cut, as all before it do then."""
        with self._changed:
            self._raise_wrong()
            if self._ends_monotonic is not None:
                raise sqlite3.ProgrammingError(f"{self._path} is closed")
            self._waiting.append((write, durable))
            self._newest.append(write)
            self._given += 1
            self._drop_oldest()
            if self._refusal is None:
                self._changed.notify_all()

    def forget_newest(self) -> None:
        """Do none of the writes taken so far again, since the next ones undo some of them."""
        with self._changed:
            self._newest.clear()

    async def settled(self) -> None:
        """Wait until all that was taken is written, or is refused. A lock is waited for BUSY_SECONDS."""
        loop, is_settled = asyncio.get_running_loop(), asyncio.Event()
        with self._changed:
            if self._is_settled(self._given):
                return
            self._waiters.append((self._given, lambda: loop.call_soon_threadsafe(is_settled.set)))
        await is_settled.wait()
        with self._changed:
            self._raise_wrong()

    def settle(self) -> bool:
        """Wait until all that was taken is written, or is refused; False for the latter. A lock isn't waited for."""
        with self._changed:
            given = self._given
            self._changed.wait_for(lambda: self._settled >= given or self._refusal is not None or self._is_over)
            self._raise_wrong()
            return self._settled >= given

    def require(self) -> None:
        """Raises BusyError if another process has the record locked, and InvalidInputError if the disk refuses what
        was taken."""
        self.put(lambda _: None)
        if not self.settle() and isinstance(refused := self._refusal, BusyError):
            raise refused

    def rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Read after all writes so far, as far as they aren't refused. Raises InvalidInputError."""
        self.settle()
        try:
            return self._read(sql, values)
        except DamagedError:
            self.remake()
            return self._read(sql, values)

    def remake(self) -> None:
        """Make the record again, in which a reader has found damage, as far as that is possible."""
        with self._changed:
            self._is_damaged = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_damaged or self._is_over)

    def _read(self, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
        with self._reading, refusing_damage(self._path):
            return self._reader.execute(sql, values).fetchall()

    @property
    def is_behind(self) -> bool:
        """Return whether something waits in memory."""
        return self._settled < self._given

    @property
    def refusal(self) -> InvalidInputError | None:
        """Why what waits in memory could not be written when that was last tried; None if it could."""
        return self._refusal

    @property
    def problem(self) -> str | None:
        """One line on what is wrong with the record, the same until that changes; None if nothing is."""
        lost = "; the oldest are lost" if self._lost else ""
        refused, now = self._refusal, time.monotonic()
        if refused is not None and (not isinstance(refused, BusyError) or now > self._refused_monotonic + BUSY_SECONDS):
            return f"{refused}; steps and events wait in memory{lost}"
        if now < self._said_until:
            return self._said
        return f"{self._path}: {self._lost} writes were lost while it could not be written" if self._lost else None

    def close(self) -> None:
        """Write what waits, and let the record go. If another process has it locked, that happens later."""
        with self._changed:
            if self._ends_monotonic is None:
                self._ends_monotonic = time.monotonic() + CLOSE_SECONDS
                self._retry_monotonic = 0.0
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._is_over or isinstance(self._refusal, BusyError))
        if self._is_over:
            self._thread.join()
        else:
            atexit.register(self._thread.join)  # the process doesn't end before it has written

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        try:
            while self._wait():
                self._turn()
        except BaseException as error:  # noqa: BLE001  raised where the owner waits
            self._wrong = error
        finally:
            self._close_files()
            self._ballast.release()
            with self._changed:
                self._is_over = True
                self._release()

    def _wait(self) -> bool:
        """Wait until there is something to do; False: nothing ever is."""
        with self._changed:
            now = time.monotonic()
            if self._ends_monotonic is not None and (not self._waiting or now > self._ends_monotonic):
                return False
            if self._refusal is not None and now < self._retry_monotonic:
                self._changed.wait(self._retry_monotonic - now)
            elif not self._waiting and not self._is_damaged:
                self._changed.wait(LOOK_SECONDS)
        return True

    def _turn(self) -> None:
        with self._changed:
            if self._refusal is not None and time.monotonic() < self._retry_monotonic:
                return
            part = list(islice(self._waiting, WRITES_AT_ONCE))
            settled = self._settled + len(part)
        try:
            if self._is_damaged:
                self._rebuild()
            elif self._look() != self._inodes:
                self._write_again()
            self._write(part)
        except InvalidInputError as error:
            self._refuse(error)
        except UNREADABLE as error:
            self._refuse(refusal(self._path, error))
        else:
            self._settle(settled)
        if self._refusal is None and time.monotonic() >= self._retry_monotonic:
            self._retry_monotonic = time.monotonic() + RETRY_SECONDS
            self._ballast.take()

    def _write(self, part: Sequence[tuple[Write, bool]]) -> None:
        """Write in one transaction, at the second try where the first one's problem could be solved. Raises
        InvalidInputError."""
        try:
            self._transact(part)
        except sqlite3.Error as error:
            if isinstance(error, _WRONG):
                self._write_each(part)
                return
            refused = self._refused(error)
            if isinstance(refused, DamagedError) and self._look() != self._inodes:
                self._write_again()
            elif isinstance(refused, DamagedError):
                self._rebuild()
            elif isinstance(refused, BusyError) or not self._ballast.release():
                raise refused from None
            self._write(part) if isinstance(refused, DamagedError) else self._transact(part)
        except UNREADABLE:
            self._write_each(part)

    def _refused(self, error: sqlite3.Error) -> InvalidInputError:
        """The holder of a lock is looked for once, as that can take time."""
        known = self._refusal
        return known if isinstance(known, BusyError) and is_busy(error) else refusal(self._path, error)

    def _transact(self, part: Sequence[tuple[Write, bool]]) -> None:
        if not part:
            return
        connection = self._connection
        set_durable(connection, any(durable for _, durable in part) or self._ends_monotonic is not None)
        with connection:  # commits, or rolls back
            connection.execute("BEGIN IMMEDIATE")
            for write, _ in part:
                write(connection)

    def _write_each(self, part: Sequence[tuple[Write, bool]]) -> None:
        """One of these writes is wrong, or stumbles over what it finds, and is left out. SQLite's errors of a wrong
        statement are raised where the next write is given."""
        for one in part:
            try:
                self._transact([one])
            except _WRONG as error:
                self._wrong = error
            except (ValueError, TypeError, LookupError, OverflowError, struct.error):
                self._lost += 1

    def _raise_wrong(self) -> None:
        wrong = self._wrong
        if wrong is not None:
            self._wrong = wrong if self._is_over else None
            raise wrong

    def _settle(self, settled: int) -> None:
        with self._changed:
            while self._settled < settled:
                self._waiting.popleft()
                self._settled += 1
            if self._refusal is not None:
                self._retry_monotonic = time.monotonic() + RETRY_SECONDS  # when the ballast may be taken again
            self._refusal, self._is_damaged = None, False
            self._release()

    def _refuse(self, error: InvalidInputError) -> None:
        with self._changed:
            now = time.monotonic()
            is_new = self._refusal is None or type(self._refusal) is not type(error)
            self._refusal, self._is_damaged = error, False
            self._refused_monotonic = now if is_new else self._refused_monotonic
            self._retry_monotonic = now + (BUSY_RETRY_SECONDS if isinstance(error, BusyError) else RETRY_SECONDS)
            if self._ends_monotonic is not None and not isinstance(error, BusyError):
                self._ends_monotonic = 0.0  # there is no one left to wait for the disk
            self._drop_oldest()
            self._release()

    def _is_settled(self, given: int) -> bool:
        refused = self._refusal
        is_over = refused is not None and (
            not isinstance(refused, BusyError) or time.monotonic() > self._refused_monotonic + BUSY_SECONDS
        )
        return self._settled >= given or is_over or self._is_over

    def _release(self) -> None:
        """Wake those whose writes are settled."""
        self._changed.notify_all()
        due = [tell for given, tell in self._waiters if self._is_settled(given)]
        self._waiters = [waiter for waiter in self._waiters if not self._is_settled(waiter[0])]
        for tell in due:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                tell()

    def _drop_oldest(self) -> None:
        while len(self._waiting) > WAITING_WRITES:
            self._waiting.popleft()
            self._settled += 1
            self._lost += 1

    # ------------------------------------------------------------ lost and damaged files

    def _look(self) -> tuple[int | None, int | None]:
        return _inode(self._path), _inode(self._path.with_name(f"{self._path.name}-wal"))

    def _write_again(self) -> None:
        """Write the whole record where its files were deleted: what is open here still has all of it."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.unlink(missing_ok=True)
        try:
            with contextlib.closing(sqlite3.connect(fresh)) as target:
                self._connection.backup(target)
        except sqlite3.Error as error:
            if not isinstance(refused := self._refused(error), DamagedError):
                raise refused from None
            self._rebuild()
            return
        self._close_files()
        aside = salvage.put_in_place(fresh, self._path, "replaced")
        self._open()
        moved = f"; what was in its place is now {aside.name}" if aside is not None else ""
        self._say(f"{self._path}: its files were deleted or replaced while the run used them; written again{moved}")

    def _rebuild(self) -> None:
        """Make the record again from what can be read of it. Raises InvalidInputError, also if that was done just
        now."""
        now = time.monotonic()
        if now < self._rebuilt_monotonic + REBUILD_SECONDS:
            raise DamagedError(str(self._path), "is damaged again; check the disk")
        self._rebuilt_monotonic = now
        self._make_again()

    def _make_again(self) -> None:
        fresh = salvage.copy_readable(self._path, RUN_SCHEMA, self._complete_again)
        self._close_files()
        aside = salvage.put_in_place(fresh, self._path, "damaged")
        self._open()
        where = f"moved to {aside.name}" if aside is not None else "its file is gone"
        self._say(f"{self._path}: was damaged; {where}, and made again from what could be read of it")

    def _complete_again(self, connection: sqlite3.Connection) -> None:
        self._complete(connection)
        connection.execute("BEGIN")
        for write in self._newest.copy():
            with contextlib.suppress(*UNREADABLE):
                write(connection)
        connection.execute("COMMIT")

    def _close_files(self) -> None:
        with self._reading, contextlib.suppress(sqlite3.Error):
            self._reader.close()
            self._connection.close()

    def _say(self, text: str) -> None:
        self._said, self._said_until = text, time.monotonic() + SAID_SECONDS


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
