"""The agent's database, agent.db: commands and their outcomes, known runs, the highest generation seen.

Every write survives a power cut before its method returns. If the disk refuses one, `accept` and `add_run` say so with
RefusedError; what they began is kept in memory instead, `problem` says so, and it is written with a later write.
Another process's lock is never waited for. A database that is damaged or was deleted is made again from what can be
read of it and from the folders of the runs.
"""

import contextlib
import hashlib
import json
import math
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from trainctl.protocol.errors import BusyError, DamagedError, InvalidInputError, RefusedError
from trainctl.protocol.messages import (
    FINAL_COMMAND_STATES,
    Command,
    CommandReply,
    Generation,
    KeptCommand,
    Refused,
    RunKind,
    RunState,
)
from trainctl.protocol.record import salvage
from trainctl.protocol.record.paths import runs_directory
from trainctl.protocol.record.schema import AGENT_SCHEMA, UNREADABLE, open_for_writing, refusing_damage

T = TypeVar("T")
_COLUMNS = tuple(name for name in KeptCommand.__struct_fields__ if name != "v")
"""Columns of a command, each named as the message's field that it has."""
_COMMAND_COLUMNS, _MARKS = ", ".join(_COLUMNS), ", ".join("?" * len(_COLUMNS))
_COMMAND = f"INSERT INTO commands ({_COMMAND_COLUMNS}) VALUES ({_MARKS}) ON CONFLICT DO NOTHING"  # noqa: S608
_OUTCOME = (
    "UPDATE commands SET state = ?, step = ?, reason = ?, field = ?, before = ?, after = ?, ended_at = ?,"
    " plan_version = ?, run = coalesce(?, run) WHERE id = ? AND state = 'accepted'"
)
_GENERATION = "REPLACE INTO meta VALUES ('generation', ?)"
_REFUSAL = "REPLACE INTO refusals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_OLD_REFUSALS = "DELETE FROM refusals WHERE id <= (SELECT max(id) FROM refusals) - ?"
MAX_REFUSALS = 2000
RETRY_SECONDS = 0.1
"""Seconds until what was refused is tried again."""
SAID_SECONDS = 5.0
"""Seconds for which `problem` says that the database was made again."""
FORGOTTEN_SECONDS = 30.0
"""Twice the seconds that a claim takes with all its tries (roles/election.py)."""
_CONSENT = "REPLACE INTO meta VALUES ('consent', ?)"
_LATE_EVENTS = "REPLACE INTO meta VALUES ('late_events', ?)"


class JournaledCommand(KeptCommand, tag="kept-command", frozen=True):
    """A command as accepted, and how it ended if it has; as it stands it is handed on to other nodes."""

    @property
    def is_open(self) -> bool:
        return self.state not in FINAL_COMMAND_STATES

    def reply(self, rid: str) -> CommandReply:
        """The answer to a client that asks again under `rid`."""
        names = ("id", "state", "step", "reason", "field", "before", "after", "plan_version", "run")
        return CommandReply(rid=rid, **{name: getattr(self, name) for name in names})


@dataclass(frozen=True)
class KnownRun:
    """A run of this node."""

    run: str
    name: str
    directory: Path
    started_at: float  # Unix seconds
    state: RunState
    reason: str
    kind: RunKind = "hosted"


@dataclass(frozen=True)
class FollowedRun:
    """Run that another node's agent leads, and this node's rank in it."""

    run: str
    rank: int
    lead: str  # node
    address: str  # where its agent takes requests

    def is_same(self, other: "FollowedRun") -> bool:
        """Return whether it is the same rank for the same lead, wherever that is reached."""
        return (self.run, self.rank, self.lead) == (other.run, other.rank, other.lead)


def digest_of(command: Command) -> str:
    """SHA-256 over what a command asks for, the same for the same body whatever its id, sender or time."""
    body = [command.verb, command.args, command.node, command.run, command.if_plan]
    return hashlib.sha256(_json(body).encode()).hexdigest()


class AgentDb:
    """Open for the life of an agent. Raises InvalidInputError if the file cannot be used."""

    def __init__(self, path: Path, complete: Callable[[sqlite3.Connection], None] = lambda _: None) -> None:
        """`complete` adds what the folders of the runs know to a database that is made again. Raises
        InvalidInputError."""
        self._path, self._complete = path, complete
        self._late: list[tuple[str, Sequence[Any]]] = []
        self._refusal = self._said = ""
        self.is_busy = False
        self._retry_monotonic = self._said_until = 0.0
        self._made_monotonic = -math.inf
        self._generation: Generation | None = None
        self._consent: tuple[int, str, str] | None = None
        self._late_events = ""
        was_there = path.exists()
        try:
            self._open()
        except DamagedError:
            self._make_again()
        else:
            if not was_there:
                with self._transaction():
                    complete(self._connection)
                self._learn()
                if self.runs():
                    self._made_monotonic = time.monotonic()

    def _open(self) -> None:
        """Raises InvalidInputError if the file cannot be used, DamagedError also if any row can't be read."""
        self._connection = open_for_writing(self._path, AGENT_SCHEMA, durable=True)
        self._inode = _inode(self._path)
        try:
            with refusing_damage(self._path, *UNREADABLE):
                if not salvage.is_sound(self._connection):
                    raise DamagedError(str(self._path), "SQLite finds it malformed")
                if _unreadable(self._connection):
                    raise DamagedError(str(self._path), "it has values that were not written to it")
                self._learn()
        except InvalidInputError:
            self._connection.close()
            raise

    def _learn(self) -> None:
        kept = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        generation = _generation(kept["generation"]) if "generation" in kept else None
        self._generation = max(filter(None, (generation, self._generation)), default=None)
        self._consent = _consent(kept["consent"]) if "consent" in kept else self._consent
        self._late_events = kept.get("late_events", self._late_events)

    def _make_again(self) -> None:
        """Raises InvalidInputError."""

        def complete(connection: sqlite3.Connection) -> None:
            for table, keys in _unreadable(connection):
                connection.execute(f"DELETE FROM {table} WHERE {_KEYS[table]} = ?", keys)  # noqa: S608  constants
            self._complete(connection)

        aside = salvage.rebuild(self._path, AGENT_SCHEMA, complete)
        self._made_monotonic = time.monotonic()
        self._open()
        self._keep_again()
        where = f"moved to {aside.name}" if aside is not None else "its file is gone"
        self._said = f"{self._path}: was damaged; {where}, and made again from it and from the runs' folders"
        self._said_until = time.monotonic() + SAID_SECONDS

    def _keep_again(self) -> None:
        """Write what memory, or the highest generation of the runs' folders, adds to a database that was made again."""
        if self._generation is not None:
            self._write_or_keep(_GENERATION, (f"{self._generation.term}.{self._generation.n}",))
        if self._consent is not None:
            self._write_or_keep(_CONSENT, (" ".join(map(str, self._consent)),))
        if self._late_events:
            self._write_or_keep(_LATE_EVENTS, (self._late_events,))

    @property
    def may_have_forgotten_consent(self) -> bool:
        """Return whether the database was made again within FORGOTTEN_SECONDS, and may have held a consent.

        Until then, a claim to which this node has consented has been carried out or given up, and its term is known.
        """
        return self._consent is None and time.monotonic() < self._made_monotonic + FORGOTTEN_SECONDS

    @property
    def problem(self) -> str | None:
        """One line on what is wrong with the database, None if nothing is."""
        if self._refusal:
            return f"{self._refusal}; {len(self._late)} writes wait in memory" if self._late else self._refusal
        return self._said if time.monotonic() < self._said_until else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.retry()
        self._connection.close()

    def accept(self, command: Command, digest: str, at: float) -> bool:
        """Journal a command received `at` (Unix seconds); False, and nothing changed, if its id is known already.

        Raises RefusedError if it cannot be journaled, and then it must not be acted on.
        """
        names = ("id", "verb", "args", "by", "run", "node", "if_plan", "ttl_seconds", "undoes")
        asked = {name: getattr(command, name) for name in names}
        kept = KeptCommand(**asked, digest=digest, received_at=at, state="accepted")
        return self._write_now("command not journaled", _COMMAND, _row(kept))

    def outcome(self, ended: KeptCommand) -> None:
        """Keep how a command ended, and which run it turned out to be about.

        The first outcome stays, whatever comes after it.
        """
        names = ("state", "step", "reason", "field", "before", "after", "ended_at", "plan_version", "run", "id")
        self._write_or_keep(_OUTCOME, [getattr(ended, name) for name in names])

    def set_run(self, command_id: str, run: str) -> None:
        """Keep which run a command turned out to be about."""
        self._write_or_keep("UPDATE commands SET run = ? WHERE id = ?", (run, command_id))

    def find(self, command_id: str) -> JournaledCommand | None:
        self.retry()
        rows = self._rows(f"SELECT {_COMMAND_COLUMNS} FROM commands WHERE id = ?", (command_id,))  # noqa: S608
        return next((_command(row) for row in rows), None)

    def open_commands(self) -> tuple[JournaledCommand, ...]:
        """Commands without an outcome, as they came in."""
        self.retry()
        rows = self._rows(
            f"SELECT {_COMMAND_COLUMNS} FROM commands WHERE state = 'accepted' ORDER BY received_at, id"  # noqa: S608
        )
        return tuple(_command(row) for row in rows)

    def add_run(
        self, run: str, name: str, started_at: float, state: RunState = "starting", kind: RunKind = "hosted"
    ) -> None:
        """Raises RefusedError if it cannot be kept, and then it must not be started."""
        row = (run, name, run_column(run), started_at, state, kind)
        if not self._write_now(
            "run not kept", "INSERT INTO runs VALUES (?, ?, ?, ?, ?, '', ?) ON CONFLICT DO NOTHING", row
        ):
            raise RefusedError(f"run {run} already exists")

    def follow(self, followed: FollowedRun) -> None:
        """Keep that a run is led by another node's agent, and by which."""
        self._write_or_keep(
            "REPLACE INTO followed VALUES (?, ?, ?, ?)",
            (followed.run, followed.rank, followed.lead, followed.address),
        )

    def followed(self, run: str) -> FollowedRun | None:
        """Return the node that leads a run of this node, None if its own agent does."""
        self.retry()
        rows = self._rows("SELECT run, rank, lead, address FROM followed WHERE run = ?", (run,))
        return next((FollowedRun(*row) for row in rows), None)

    def unfollow(self, run: str) -> None:
        """This node's own agent leads a run from here on."""
        self._write_or_keep("DELETE FROM followed WHERE run = ?", (run,))

    @property
    def late_events(self) -> str:
        """Return what `LateEvents` keeps, as JSON; empty: nothing yet."""
        return self._late_events

    @late_events.setter
    def late_events(self, value: str) -> None:
        self._late_events = value
        self._write_or_keep(_LATE_EVENTS, (value,))

    def consent(self, term: int, claimant: str, run: str) -> str:
        """Consent to `claimant` in `term`, unless this node has consented to one in that term or a newer one.

        Returns the node that has its consent: `claimant`, another one, or "NODE in term N" where N is newer.
        """
        if self._consent is None or term > self._consent[0]:
            self._consent = term, claimant, run
            self._write_or_keep(_CONSENT, (f"{term} {claimant} {run}",))
        return self._consent[1] if term == self._consent[0] else f"{self._consent[1]} in term {self._consent[0]}"

    def consented_term(self, run: str) -> int:
        """The term of a run in which this node has consented to a claimant, 0 if it has not."""
        return self._consent[0] if self._consent is not None and self._consent[2] == run else 0

    @property
    def term(self) -> int:
        """The highest that was seen or consented to."""
        return max(self._generation.term if self._generation else 0, self._consent[0] if self._consent else 0)

    def keep_command(self, kept: KeptCommand) -> None:
        """A command as the lead of a run has it, and how it ended if it has."""
        known = self.find(kept.id)
        if known is not None and (not known.is_open or known.state == kept.state):
            return
        self._write_or_keep(_COMMAND, _row(kept))
        if kept.state in FINAL_COMMAND_STATES:
            self.outcome(kept)

    def commands_of(self, run: str, limit: int) -> tuple[JournaledCommand, ...]:
        """The newest commands about a run, oldest first."""
        self.retry()
        rows = self._rows(
            f"SELECT {_COMMAND_COLUMNS} FROM commands WHERE run = ? ORDER BY received_at DESC LIMIT ?",  # noqa: S608
            (run, limit),
        )
        return tuple(map(_command, reversed(rows)))

    def known_run(self, run: str) -> KnownRun | None:
        """A run of this node, None if there is none of this id."""
        return next((known for known in self.runs() if known.run == run), None)

    def rename_run(self, run: str, name: str) -> None:
        self._write_or_keep("UPDATE runs SET name = ? WHERE run = ?", (name, run))

    def forget_run(self, run: str) -> None:
        """Forget a run that never began, or that is removed."""
        for table in ("runs", "followed"):
            self._write_or_keep(f"DELETE FROM {table} WHERE run = ?", (run,))  # noqa: S608  constants

    def set_run_state(self, run: str, state: RunState, reason: str = "") -> None:
        self._write_or_keep("UPDATE runs SET state = ?, reason = ? WHERE run = ?", (state, reason, run))

    def runs(self) -> tuple[KnownRun, ...]:
        """Newest first."""
        self.retry()
        rows = self._rows(
            "SELECT run, name, started_at, state, reason, kind FROM runs ORDER BY started_at DESC, run DESC"
        )
        folder = runs_directory(self._path.parent)
        return tuple(KnownRun(run, name, folder / run, *rest) for run, name, *rest in rows)

    @property
    def generation(self) -> Generation | None:
        """The highest seen, None before the first."""
        return self._generation

    def saw(self, generation: Generation) -> bool:
        """Keep a generation if it is the highest yet; False if a higher one is known, and it must be refused."""
        if self._generation is not None and generation <= self._generation:
            return generation == self._generation
        self._generation = generation
        self._write_or_keep(_GENERATION, (f"{generation.term}.{generation.n}",))
        return True

    def last_refusal(self) -> int:
        """The number of the newest refusal that is kept, 0 if none is."""
        ((number,),) = self._rows("SELECT coalesce(max(id), 0) FROM refusals")
        return int(number)

    def keep_refusals(self, rows: Sequence[Sequence[Any]]) -> bool:
        """Keep refusals, in the order of the table's columns, in place of those of the same number; the newest
        MAX_REFUSALS stay. False if the disk refuses them."""

        def write() -> None:
            with self._transaction():
                self._connection.executemany(_REFUSAL, rows)
                self._connection.execute(_OLD_REFUSALS, (MAX_REFUSALS,))

        try:
            self._do(write)
        except InvalidInputError:
            return False
        return True

    def refusals(self, limit: int) -> tuple[Refused, ...]:
        """The newest, newest first."""
        rows = self._rows("SELECT * FROM refusals ORDER BY id DESC LIMIT ?", (limit,))
        return tuple(Refused(*row[1:]) for row in rows)

    def retry(self) -> None:
        """Write what was refused before, if there is any and it is time."""
        if not self._late or time.monotonic() < self._retry_monotonic:
            return

        def write() -> None:
            with self._transaction():
                for sql, values in self._late:
                    self._connection.execute(sql, values)

        try:
            self._do(write)
        except InvalidInputError as error:
            self._refuse(error)
        else:
            self._late.clear()
            self._refusal, self.is_busy = "", False

    def _refuse(self, error: InvalidInputError) -> None:
        if not (self.is_busy and isinstance(error, BusyError)):  # the same holder
            self._refusal = str(error)
        self.is_busy = isinstance(error, BusyError)
        self._retry_monotonic = time.monotonic() + RETRY_SECONDS

    def _write_now(self, what: str, sql: str, values: Sequence[Any]) -> bool:
        """Return whether a row was added."""
        self.retry()
        try:
            added = self._do(lambda: self._connection.execute(sql, values).rowcount == 1)
        except InvalidInputError as error:
            self._refuse(error)
            raise RefusedError(f"{self._refusal}: {what}") from None
        if not self._late:
            self._refusal, self.is_busy = "", False
        return added

    def _rows(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._do(lambda: self._connection.execute(sql, values).fetchall())

    def _do(self, work: Callable[[], T]) -> T:
        """Work with the database, once more if it had to be made again. Raises InvalidInputError."""
        try:
            with refusing_damage(self._path):
                return work()
        except DamagedError:
            if time.monotonic() < self._made_monotonic + SAID_SECONDS:
                raise
            if _inode(self._path) != self._inode:
                self._write_again()
            else:
                self._connection.close()
                self._make_again()
        with refusing_damage(self._path):
            return work()

    def _write_again(self) -> None:
        """Write the whole database where its file was deleted: what is open here still has all of it."""
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.unlink(missing_ok=True)
        with refusing_damage(self._path), contextlib.closing(sqlite3.connect(fresh)) as target:
            self._connection.backup(target)
        self._connection.close()
        salvage.put_in_place(fresh, self._path, "replaced")
        self._open()
        self._said = f"{self._path}: its file was deleted or replaced while the agent used it; written again"
        self._said_until = time.monotonic() + SAID_SECONDS

    def _write_or_keep(self, sql: str, values: Sequence[Any]) -> None:
        self._late.append((sql, values))
        self.retry()

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        with self._connection:  # commits, or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            yield


def run_column(run: str) -> str:
    """Return what the column `directory` has of a run. Its folder is never found by it: 0.2.0 wrote absolute paths, and
    the node's folder may have been moved or copied since."""
    return str(runs_directory(Path()) / run)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _unreadable(connection: sqlite3.Connection) -> list[tuple[str, tuple[Any, ...]]]:
    """The rows whose values aren't what was written, by their table and key."""
    found = list[tuple[str, tuple[Any, ...]]]()

    def check(table: str, key: Any, read: Callable[[], object]) -> None:
        try:
            read()
        except (*UNREADABLE, msgspec.MsgspecError, RecursionError):
            found.append((table, (key,)))

    for key, value in connection.execute("SELECT key, value FROM meta").fetchall():
        check("meta", key, partial(_READ.get(key, str), value))
    for row in connection.execute(f"SELECT {_COMMAND_COLUMNS} FROM commands").fetchall():  # noqa: S608
        check("commands", row[0], partial(_checked_command, row))
    for run, folder, state, kind in connection.execute("SELECT run, directory, state, kind FROM runs").fetchall():
        check("runs", run, partial(_check_run, run, folder, state, kind))
    return found


def _check_run(run: str, folder: str, state: str, kind: str) -> None:
    msgspec.convert((state, kind), tuple[RunState, RunKind])
    if Path(folder).name != run:
        raise ValueError(f"{folder} is not the folder of {run}")


def _checked_command(row: Sequence[Any]) -> JournaledCommand:
    return msgspec.convert(msgspec.to_builtins(_command(row)), JournaledCommand)


def _generation(text: str) -> Generation:
    term, n = map(int, text.split("."))
    return Generation(term, n)


def _consent(text: str) -> tuple[int, str, str]:
    term, claimant, run = text.split(" ")
    return int(term), claimant, run


_READ: dict[str, Callable[[str], object]] = {"generation": _generation, "consent": _consent, "late_events": json.loads}
_KEYS = {"meta": "key", "commands": "id", "runs": "run"}


def _command(row: Sequence[Any]) -> JournaledCommand:
    fields = dict(zip(_COLUMNS, row, strict=True))
    return JournaledCommand(**{**fields, "args": json.loads(fields["args"])})


def _row(kept: KeptCommand) -> list[Any]:
    return [_json(kept.args) if name == "args" else getattr(kept, name) for name in _COLUMNS]


def _json(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Return a value in JSON's terms: msgpack also has bytes, as values and as keys."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
