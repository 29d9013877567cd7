"""The agent's database, agent.db: commands and their outcomes, known runs, the highest generation seen.

Every write survives a power cut before its method returns. If the disk refuses one, `accept` and `add_run` say so with
RefusedError; what they began is kept in memory instead, `problem` says so, and it is written with a later write.
"""

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.record.schema import AGENT_SCHEMA, open_for_writing

_COMMAND_COLUMNS = (
    "id, digest, verb, args, by, run, node, if_plan, received_at, ttl_seconds, state, step, reason, field, before,"
    " after, ended_at, plan_version, undoes"
)
_ACCEPT = (
    "INSERT INTO commands (id, digest, verb, args, by, run, node, if_plan, received_at, ttl_seconds, state,"
    " undoes) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)
_OUTCOME = (
    "UPDATE commands SET state = ?, step = ?, reason = ?, field = ?, before = ?, after = ?, ended_at = ?,"
    " plan_version = ?, run = coalesce(?, run) WHERE id = ? AND state = 'accepted'"
)
_MARKS = ", ".join("?" * len(_COMMAND_COLUMNS.split(",")))
_KNOWN = f"INSERT INTO commands ({_COMMAND_COLUMNS}) VALUES ({_MARKS}) ON CONFLICT DO NOTHING"  # noqa: S608
_GENERATION = "REPLACE INTO meta VALUES ('generation', ?)"
_REFUSAL = "REPLACE INTO refusals VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
_OLD_REFUSALS = "DELETE FROM refusals WHERE id <= (SELECT max(id) FROM refusals) - ?"
MAX_REFUSALS = 2000
_CONSENT = "REPLACE INTO meta VALUES ('consent', ?)"
_LATE_EVENTS = "REPLACE INTO meta VALUES ('late_events', ?)"


class JournaledCommand(m.KeptCommand, tag="kept-command", frozen=True):
    """A command as accepted, and how it ended if it has; as it stands it is handed on to other nodes."""

    @property
    def is_open(self) -> bool:
        return self.state not in m.FINAL_COMMAND_STATES

    def reply(self, rid: str) -> m.CommandReply:
        """The answer to a client that asks again under `rid`."""
        return m.CommandReply(
            rid=rid, id=self.id, state=self.state, step=self.step, reason=self.reason, field=self.field,
            before=self.before, after=self.after, plan_version=self.plan_version, run=self.run,
        )  # fmt: skip


@dataclass(frozen=True)
class KnownRun:
    """A run of this node."""

    run: str
    name: str
    directory: Path
    started_at: float  # Unix seconds
    state: m.RunState
    reason: str
    kind: m.RunKind = "hosted"


@dataclass(frozen=True)
class FollowedRun:
    """What this node has to do with a run that another node's agent leads."""

    run: str
    rank: int
    lead: str  # node
    address: str  # where its agent takes requests

    def is_same(self, other: "FollowedRun") -> bool:
        """Whether it is the same rank for the same lead, wherever that is reached."""
        return (self.run, self.rank, self.lead) == (other.run, other.rank, other.lead)


def digest_of(command: m.Command) -> str:
    """SHA-256 over what a command asks for, the same for the same body whatever its id, sender or time."""
    body = [command.verb, command.args, command.node, command.run, command.if_plan]
    return hashlib.sha256(_json(body).encode()).hexdigest()


class AgentDb:
    """Open for the life of an agent. Raises InvalidInputError if the file cannot be used."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = open_for_writing(path, AGENT_SCHEMA, durable=True)
        self._late: list[tuple[str, Sequence[Any]]] = []
        self.problem: str | None = None
        kept = dict(self._connection.execute("SELECT key, value FROM meta").fetchall())
        self._generation = m.Generation(*map(int, kept["generation"].split("."))) if "generation" in kept else None
        consent = kept["consent"].split(" ") if "consent" in kept else None
        self._consent = (int(consent[0]), consent[1], consent[2]) if consent else None
        self._late_events: str = kept.get("late_events", "")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.retry()
        self._connection.close()

    def accept(self, command: m.Command, digest: str, at: float) -> bool:
        """Journal a command received `at` (Unix seconds); False, and nothing changed, if its id is known already.

        Raises RefusedError if it cannot be journaled, and then it must not be acted on.
        """
        row = (
            command.id, digest, command.verb, _json(command.args), command.by, command.run, command.node,
            command.if_plan, at, command.ttl_seconds, "accepted", command.undoes,
        )  # fmt: skip
        return self._write_now("command not journaled", _ACCEPT, row)

    def outcome(
        self, command_id: str, state: m.CommandState, step: int | None = None, reason: str = "",
        field: str | None = None, before: str | None = None, after: str | None = None, at: float | None = None,
        run: str | None = None, plan_version: int | None = None,
    ) -> None:  # fmt: skip
        """Keep how a command ended `at` (Unix seconds; None: now); `run` is the one it turned out to be about.

        The first outcome stays, whatever comes after it.
        """
        ended_at = time.time() if at is None else at
        row = (state, step, reason, field, before, after, ended_at, plan_version, run, command_id)
        self._write_or_keep(_OUTCOME, row)

    def set_run(self, command_id: str, run: str) -> None:
        """Keep which run a command turned out to be about."""
        self._write_or_keep("UPDATE commands SET run = ? WHERE id = ?", (run, command_id))

    def find(self, command_id: str) -> JournaledCommand | None:
        self.retry()
        rows = self._connection.execute(f"SELECT {_COMMAND_COLUMNS} FROM commands WHERE id = ?", (command_id,))  # noqa: S608
        return next((_command(row) for row in rows), None)

    def open_commands(self) -> tuple[JournaledCommand, ...]:
        """Commands without an outcome, as they came in."""
        self.retry()
        rows = self._connection.execute(
            f"SELECT {_COMMAND_COLUMNS} FROM commands WHERE state = 'accepted' ORDER BY received_at, id"  # noqa: S608
        )
        return tuple(_command(row) for row in rows)

    def add_run(
        self, run: str, name: str, directory: Path, started_at: float, state: m.RunState = "starting",
        kind: m.RunKind = "hosted",
    ) -> None:  # fmt: skip
        """Raises RefusedError if it cannot be kept, and then it must not be started."""
        row = (run, name, str(directory), started_at, state, kind)
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
        """Who leads a run of this node, None if its own agent does."""
        self.retry()
        rows = self._connection.execute("SELECT run, rank, lead, address FROM followed WHERE run = ?", (run,))
        return next((FollowedRun(*row) for row in rows), None)

    def unfollow(self, run: str) -> None:
        """This node's own agent leads a run from here on."""
        self._write_or_keep("DELETE FROM followed WHERE run = ?", (run,))

    @property
    def late_events(self) -> str:
        """What `LateEvents` keeps, as JSON; empty: nothing yet."""
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

    def keep_command(self, kept: m.KeptCommand) -> None:
        """A command as the lead of a run has it, and how it ended if it has."""
        known = self.find(kept.id)
        if known is not None and (not known.is_open or known.state == kept.state):
            return
        values = msgspec.structs.asdict(kept)
        values["args"] = _json(kept.args)
        names = (name.strip() for name in _COMMAND_COLUMNS.split(","))
        self._write_or_keep(_KNOWN, [values[name] for name in names])
        if kept.state in m.FINAL_COMMAND_STATES:
            self.outcome(
                kept.id, kept.state, kept.step, kept.reason, kept.field, kept.before, kept.after, kept.ended_at,
                kept.run, kept.plan_version,
            )  # fmt: skip

    def commands_of(self, run: str, limit: int) -> tuple[JournaledCommand, ...]:
        """The newest commands about a run, oldest first."""
        self.retry()
        rows = self._connection.execute(
            f"SELECT {_COMMAND_COLUMNS} FROM commands WHERE run = ? ORDER BY received_at DESC LIMIT ?",  # noqa: S608
            (run, limit),
        )
        return tuple(map(_command, reversed(rows.fetchall())))

    def known_run(self, run: str) -> KnownRun | None:
        """A run of this node, None if there is none of this id."""
        return next((known for known in self.runs() if known.run == run), None)

    def forget_run(self, run: str) -> None:
        """A run that never began."""
        for table in ("runs", "followed"):
            self._write_or_keep(f"DELETE FROM {table} WHERE run = ?", (run,))  # noqa: S608  constants

    def set_run_state(self, run: str, state: m.RunState, reason: str = "") -> None:
        self._write_or_keep("UPDATE runs SET state = ?, reason = ? WHERE run = ?", (state, reason, run))

    def runs(self) -> tuple[KnownRun, ...]:
        """Newest first."""
        self.retry()
        rows = self._connection.execute(
            "SELECT run, name, directory, started_at, state, reason, kind FROM runs ORDER BY started_at DESC, run DESC"
        )
        return tuple(KnownRun(run, name, Path(folder), *rest) for run, name, folder, *rest in rows)

    @property
    def generation(self) -> m.Generation | None:
        """The highest seen, None before the first."""
        return self._generation

    def saw(self, generation: m.Generation) -> bool:
        """Keep a generation if it is the highest yet; False if a higher one is known, and it must be refused."""
        if self._generation is not None and generation <= self._generation:
            return generation == self._generation
        self._generation = generation
        self._write_or_keep(_GENERATION, (f"{generation.term}.{generation.n}",))
        return True

    def last_refusal(self) -> int:
        """The number of the newest refusal that is kept, 0 if none is."""
        (number,) = self._connection.execute("SELECT coalesce(max(id), 0) FROM refusals").fetchone()
        return int(number)

    def keep_refusals(self, rows: Sequence[Sequence[Any]]) -> bool:
        """Keep refusals, in the order of the table's columns, in place of those of the same number; the newest
        MAX_REFUSALS stay. False if the disk refuses them."""
        try:
            with self._transaction():
                self._connection.executemany(_REFUSAL, rows)
                self._connection.execute(_OLD_REFUSALS, (MAX_REFUSALS,))
        except sqlite3.OperationalError:
            return False
        return True

    def refusals(self, limit: int) -> tuple[m.Refused, ...]:
        """The newest, newest first."""
        rows = self._connection.execute("SELECT * FROM refusals ORDER BY id DESC LIMIT ?", (limit,))
        return tuple(m.Refused(*row[1:]) for row in rows)

    def retry(self) -> None:
        """Write what the disk refused before, if there is any."""
        if not self._late:
            return
        try:
            with self._transaction():
                for sql, values in self._late:
                    self._connection.execute(sql, values)
        except sqlite3.OperationalError as error:
            self.problem = f"{self._path}: {error}; {len(self._late)} writes wait in memory"
        else:
            self._late.clear()
            self.problem = None

    def _write_now(self, what: str, sql: str, values: Sequence[Any]) -> bool:
        """Whether a row was added."""
        self.retry()
        try:
            return self._connection.execute(sql, values).rowcount == 1
        except sqlite3.OperationalError as error:
            raise RefusedError(f"{self._path}: {what}: {error}") from None

    def _write_or_keep(self, sql: str, values: Sequence[Any]) -> None:
        self._late.append((sql, values))
        self.retry()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._connection.execute("COMMIT")
        except sqlite3.DatabaseError:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise


def _command(row: Sequence[Any]) -> JournaledCommand:
    fields = dict(zip((name.strip() for name in _COMMAND_COLUMNS.split(",")), row, strict=True))
    return JournaledCommand(**{**fields, "args": json.loads(fields["args"])})


def _json(value: Any) -> str:
    return json.dumps(_plain(value), sort_keys=True, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """The same value in JSON's terms: msgpack also has bytes, as values and as keys."""
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        return {key if isinstance(key, str) else repr(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
