"""The one writer of a record: a thread that executes writes in their order, so that no lock and no disk holds up the
agent's event loop.

A write that can't be done now stays first in line. If another process has the record locked, or the disk is full, it is
tried again until that has passed. A record that is damaged or was deleted is made again.
"""

import asyncio
import atexit
import contextlib
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Final

from trainctl.node_agent.records.record_file import LOOK_SECONDS, RecordFile
from trainctl.node_agent.records.statements import Write
from trainctl.protocol.errors import BusyError, DamagedError, InvalidInputError
from trainctl.protocol.record.schema import UNREADABLE, is_busy, refusal

RETRY_SECONDS = 5.0
"""Seconds until what the disk has refused is tried again."""
BUSY_RETRY_SECONDS = 0.1
BUSY_SECONDS = 2.0
"""Seconds for which a plan waits for another process's lock before it is passed on, and the lock is reported."""
CLOSE_SECONDS = 60.0
"""Seconds for which a closed record waits for another process's lock, in the background."""
WAITING_WRITES = 20_000
"""Most writes kept in memory. Beyond it the oldest are lost, and `problem` counts them."""
WRITES_AT_ONCE: Final = 500
REPEATED_WRITES: Final = 1000
"""Newest writes that are done again in a record that was made again from a damaged one."""

_WRONG = (sqlite3.IntegrityError, sqlite3.ProgrammingError, sqlite3.InterfaceError)


class RecordWriter:
    """Open until it is closed. All but `settled` may be called on any thread."""

    def __init__(self, path: Path, complete: Callable[[sqlite3.Connection], None] = lambda _: None) -> None:
        """`complete` adds what other files know to a record that is made again. Raises InvalidInputError."""
        self._path, self._complete = path, complete
        self._newest: deque[Write] = deque(maxlen=REPEATED_WRITES)
        self._file = RecordFile(path, self._complete_again)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, Write, bool]] = deque()  # numbered; the first ones are being written
        self._given = self._in_turn = 0  # counts of writes: of all, and of those that are being written
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

    # ------------------------------------------------------------ the owner's side

    def put(self, write: Write, *, durable: bool = False) -> None:
        """Take a write; `durable`: it survives a power cut, as all before it do then."""
        with self._changed:
            self._raise_wrong()
            if self._ends_monotonic is not None:
                raise sqlite3.ProgrammingError(f"{self._path} is closed")
            self._given += 1
            self._waiting.append((self._given, write, durable))
            self._newest.append(write)
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
        """Wait until all that was taken is written, or is refused, or lost; False for these. A lock isn't waited
        for."""
        with self._changed:
            given, lost = self._given, self._lost
            self._changed.wait_for(lambda: self._is_done(given) or self._refusal is not None or self._is_over)
            self._raise_wrong()
            return self._is_done(given) and self._lost == lost

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
            return self._file.rows(sql, values)
        except DamagedError:
            self.remake()
            return self._file.rows(sql, values)

    def remake(self) -> None:
        """Make the record again, in which a reader has found damage, as far as that is possible."""
        with self._changed:
            self._is_damaged = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._is_damaged or self._is_over)

    @property
    def is_behind(self) -> bool:
        """Return whether something waits in memory."""
        return bool(self._waiting)

    @property
    def refusal(self) -> InvalidInputError | None:
        """Return why the last try to write what waits in memory failed; None if it didn't."""
        return self._refusal

    @property
    def problem(self) -> str | None:
        """One line on what is wrong with the record, the same until that changes; None if nothing is."""
        lost = "; the oldest are lost" if self._lost else ""
        refused, now = self._refusal, time.monotonic()
        if refused is not None and (not isinstance(refused, BusyError) or now > self._refused_monotonic + BUSY_SECONDS):
            return f"{refused}; steps and events wait in memory{lost}"
        said = f"{self._path}: {self._lost} writes were lost while it could not be written" if self._lost else None
        return self._file.said or said

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
            self._file.close()
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
            part = [(write, durable) for _, write, durable in islice(self._waiting, WRITES_AT_ONCE)]
            self._in_turn = len(part)
        try:
            if self._is_damaged:
                self._file.rebuild()
            self._write(part)
        except InvalidInputError as error:
            self._refuse(error)
        except UNREADABLE as error:
            self._refuse(refusal(self._path, error))
        else:
            self._settle()
        if self._refusal is None and time.monotonic() >= self._retry_monotonic:
            self._retry_monotonic = time.monotonic() + RETRY_SECONDS
            self._file.ballast.take()

    def _write(self, part: Sequence[tuple[Write, bool]]) -> None:
        """Write in one transaction, at the second try where the first one's problem could be solved. Raises
        InvalidInputError."""
        durable = self._ends_monotonic is not None or any(durable for _, durable in part)
        self._file.look(now=durable or not part)
        if not part:
            return
        try:
            self._file.set_durable(durable)
            with self._file.connection as connection:  # commits, or rolls back
                connection.execute("BEGIN IMMEDIATE")
                for write, _ in part:
                    write(connection)
        except _WRONG as error:
            self._leave_out(part, error)
        except sqlite3.Error as error:
            self._solve(error)
            self._write(part)
        except UNREADABLE as error:
            self._leave_out(part, error)

    def _solve(self, error: sqlite3.Error) -> None:
        """Raises InvalidInputError if nothing can be done about an error. The holder of a lock is looked for once, as
        that can take time."""
        known = self._refusal
        refused = known if isinstance(known, BusyError) and is_busy(error) else refusal(self._path, error)
        if isinstance(refused, DamagedError):
            self._file.restore()
        elif isinstance(refused, BusyError) or not self._file.ballast.release():
            raise refused from None

    def _leave_out(self, part: Sequence[tuple[Write, bool]], error: Exception) -> None:
        """One of these writes is wrong, or stumbles over what it finds, and is left out. SQLite's errors of a wrong
        statement are raised where the next write is given."""
        if len(part) > 1:
            for one in part:
                self._write([one])
        elif isinstance(error, _WRONG):
            self._wrong = error
        else:
            self._lost += 1

    def _raise_wrong(self) -> None:
        wrong = self._wrong
        if wrong is not None:
            self._wrong = wrong if self._is_over else None
            raise wrong

    def _settle(self) -> None:
        with self._changed:
            for _ in range(self._in_turn):
                self._waiting.popleft()
            self._in_turn = 0
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
            self._in_turn = 0
            self._drop_oldest()
            self._release()

    def _is_done(self, given: int) -> bool:
        """Return whether nothing of what was taken up to then waits."""
        return not self._waiting or self._waiting[0][0] > given

    def _is_settled(self, given: int) -> bool:
        refused = self._refusal
        is_over = refused is not None and (
            not isinstance(refused, BusyError) or time.monotonic() > self._refused_monotonic + BUSY_SECONDS
        )
        return self._is_done(given) or is_over or self._is_over

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
            del self._waiting[self._in_turn]
            self._lost += 1

    def _complete_again(self, connection: sqlite3.Connection) -> None:
        self._complete(connection)
        connection.execute("BEGIN")
        for write in self._newest.copy():
            with contextlib.suppress(*UNREADABLE):
                write(connection)
        connection.execute("COMMIT")
