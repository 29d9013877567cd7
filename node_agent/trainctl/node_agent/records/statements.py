"""Writes to a run's record, each as a function of a connection that may be run again without harm."""

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from trainctl.protocol.messages import (
    Event,
    HeldOutPairs,
    HostReading,
    KeptPairs,
    RankStep,
    Sample,
    StepCommitted,
    StepPlan,
    is_by_name,
)
from trainctl.protocol.record.rank_record import Row, rank_row
from trainctl.protocol.record.rollups import (
    RUN_RANK,
    Evaluation,
    Fill,
    add_rank_to_rollups,
    add_run_to_rollups,
    pack,
    rebuild_rollups,
    values_from,
)
from trainctl.protocol.record.schema import NOT_GIVEN, ROLLUP_LEVELS, VALUES_FROM, VALUES_KEPT, column_value
from trainctl.protocol.wire.codec import encode

Write = Callable[[sqlite3.Connection], None]
"""Runs inside the caller's transaction."""


def plan(step_plan: StepPlan, at: float, last_seq: int, last_step: int) -> Write:
    """`at`, in Unix seconds, is when it was journaled. The two oldest plans go if they are of numbers and steps up to
    the last ones: that catches up with any backlog and never holds up the loop."""
    g = step_plan.generation
    row = (
        step_plan.seq,
        g.term,
        g.n,
        step_plan.kind,
        step_plan.step,
        step_plan.plan_version,
        step_plan.cursor,
        at,
        encode(step_plan),
    )
    oldest = "SELECT term, n, seq FROM plans ORDER BY term, n, seq LIMIT 2"
    old = f"DELETE FROM plans WHERE (term, n, seq) IN ({oldest}) AND seq <= ? AND step <= ?"  # noqa: S608

    def write(connection: sqlite3.Connection) -> None:
        connection.execute(_insertion("plans", row), row)
        if last_seq > 0:
            connection.execute(old, (last_seq, last_step))

    return write


def commit(step: StepCommitted, ranks: Sequence[RankStep], finished_at: float) -> Write:
    """The step, its ranks and their part in the rollups; what is there already is left alone."""
    row, add_parts = _step_row(step), parts(ranks, finished_at)
    key = (step.step, step.generation.term, step.generation.n)

    def write(connection: sqlite3.Connection) -> None:
        if connection.execute(_insertion("steps", row), row).rowcount:
            superseded = connection.execute(
                "UPDATE steps SET retracted = 1 WHERE step = ? AND NOT (term = ? AND n = ?) AND NOT retracted", key
            ).rowcount
            if superseded:
                connection.execute(_DELETE_VALUES, (step.step, step.step))
            _replace_values(connection, step.step, RUN_RANK, step.values)
            if superseded:
                rebuild_rollups(connection, step.step, step.step)
            else:
                add_run_to_rollups(connection, step.step)
        add_parts(connection)

    return write


def parts(ranks: Sequence[RankStep], finished_at: float) -> Write:
    """Ranks' parts in steps that are there, and their place in the rollups."""
    rows = [(rank, _rank_row(rank, finished_at)) for rank in ranks]

    def write(connection: sqlite3.Connection) -> None:
        for rank, row in rows:
            if connection.execute(_insertion("rank_steps", row), row).rowcount:
                key = (rank.step, rank.generation.term, rank.generation.n)
                if connection.execute(_STANDS, key).fetchone():
                    _replace_values(connection, rank.step, rank.rank, rank.values)
                add_rank_to_rollups(connection, rank.step, rank.rank)

    return write


def known_step(step: StepCommitted) -> Write:
    """The step as the run's lead has it: its row replaces this record's own of the same step and generation."""
    row, add = _step_row(step), commit(step, (), step.committed_at)
    key = (step.step, step.generation.term, step.generation.n)

    def write(connection: sqlite3.Connection) -> None:
        known = connection.execute(f"SELECT * FROM steps WHERE {_STEP_KEY}", key).fetchone()  # noqa: S608
        if known == _as_read(row) and _values_are(connection, step.step, RUN_RANK, step.values):
            return
        if known is not None:
            connection.execute(f"DELETE FROM steps WHERE {_STEP_KEY}", key)  # noqa: S608
        add(connection)
        if known is not None:
            rebuild_rollups(connection, step.step, step.step)

    return write


def commit_many(
    steps: Sequence[StepCommitted],
    parts: Sequence[tuple[RankStep, float]],
    fill: Fill,
) -> Write:
    """New steps, none of which replaces another, and ranks' parts in them or in earlier ones, each with when it ended.
    Their rollups are made at once at the end, the finest by `fill`."""
    step_rows, rank_rows = [_step_row(step) for step in steps], [_rank_row(*part) for part in parts]
    numbers = [step.step for step in steps] + [part.step for part, _ in parts]

    def write(connection: sqlite3.Connection) -> None:
        for rows, table in ((step_rows, "steps"), (rank_rows, "rank_steps")):
            if rows:
                connection.executemany(_insertion(table, rows[0]), rows)
        for step in steps:
            _replace_values(connection, step.step, RUN_RANK, step.values)
        for part, _ in parts:
            _replace_values(connection, part.step, part.rank, part.values)
        rebuild_rollups(connection, min(numbers), max(numbers), fill)

    return write


def known_part(part: RankStep, finished_at: float) -> Write:
    """Return the write of a rank's part in a step. `finished_at` (Unix seconds) counts if the record has no such
    part."""
    key = (part.step, part.generation.term, part.generation.n, part.rank)

    def write(connection: sqlite3.Connection) -> None:
        where = f"{_STEP_KEY} AND rank = ?"
        query = f"SELECT finished_at, rank_steps.* FROM rank_steps WHERE {where}"  # noqa: S608
        ended_at, *known = connection.execute(query, key).fetchone() or (finished_at,)
        if known:
            row = _as_read(_rank_row(part, ended_at))
            stands = connection.execute(_STANDS, key[:3]).fetchone()
            if tuple(known) == row and (not stands or _values_are(connection, part.step, part.rank, part.values)):
                return
            connection.execute(f"DELETE FROM rank_steps WHERE {where}", key)  # noqa: S608
        parts([part], ended_at)(connection)
        if known:
            rebuild_rollups(connection, part.step, part.step)

    return write


_STEP_KEY = "step = ? AND term = ? AND n = ?"
_STANDS = f"SELECT 1 FROM steps WHERE {_STEP_KEY} AND NOT retracted"  # noqa: S608


_DELETE_VALUES = f"""
    DELETE FROM metric_values WHERE step BETWEEN ?1 AND ?2
      AND rank IN (SELECT {RUN_RANK} UNION SELECT rank FROM rank_steps WHERE step BETWEEN ?1 AND ?2)
"""  # noqa: S608  constants of this program


def _replace_values(connection: sqlite3.Connection, step: int, rank: int, values: Mapping[str, float]) -> None:
    """Write the values that have no column, in place of any that are there."""
    packed = _packed(connection, values)
    if packed is None:
        connection.execute("DELETE FROM metric_values WHERE step = ? AND rank = ?", (step, rank))
    else:
        connection.execute("REPLACE INTO metric_values VALUES (?, ?, ?, ?)", (step, rank, *packed))


def _values_are(connection: sqlite3.Connection, step: int, rank: int, values: Mapping[str, float]) -> bool:
    """Return whether the record has exactly these for the step, of those that have no column."""
    known = "SELECT present, body FROM metric_values WHERE step = ? AND rank = ?"
    found: tuple[bytes, bytes] | None = connection.execute(known, (step, rank)).fetchone()
    return found == _packed(connection, values)


def _packed(connection: sqlite3.Connection, values: Mapping[str, float]) -> tuple[bytes, bytes] | None:
    """Return the values that have no column, under ids that new names get here; None if there are none."""
    named = {name: value for name, value in values.items() if is_by_name(name)}
    if not named:
        return None
    ids = dict(connection.execute("SELECT name, id FROM metric_names"))
    if new := [(name,) for name in named if name not in ids]:
        connection.executemany("INSERT INTO metric_names (name) VALUES (?)", new)
        ids = dict(connection.execute("SELECT name, id FROM metric_names"))
    return pack({ids[name]: value for name, value in named.items()})


_RANKS_WITH_VALUES = """
    WITH RECURSIVE found(rank) AS (
      SELECT min(rank) FROM metric_values
      UNION ALL SELECT (SELECT min(rank) FROM metric_values WHERE rank > found.rank) FROM found WHERE rank IS NOT NULL
    )
    SELECT rank FROM found
"""  # a seek per rank, where DISTINCT would read every row


def forget_values(connection: sqlite3.Connection) -> None:
    """Let the metrics by name go of all but the newest VALUES_KEPT steps, in whole buckets of the finest rollups."""
    oldest = "SELECT step FROM steps WHERE NOT retracted ORDER BY step DESC LIMIT 1 OFFSET ?"
    for (step,) in connection.execute(oldest, (VALUES_KEPT - 1,)).fetchall():
        kept_from = step // ROLLUP_LEVELS[0] * ROLLUP_LEVELS[0]
        if kept_from > values_from(connection):
            gone = f"DELETE FROM metric_values WHERE rank IN ({_RANKS_WITH_VALUES}) AND step < ?"  # noqa: S608
            connection.execute(gone, (kept_from,))
            connection.execute("REPLACE INTO meta VALUES (?, ?)", (VALUES_FROM, str(kept_from)))


def retract_after(step: int) -> Write:
    """Mark the steps above, and rebuild the rollups they were in."""

    def write(connection: sqlite3.Connection) -> None:
        found = connection.execute("SELECT min(step), max(step) FROM steps WHERE step > ? AND NOT retracted", (step,))
        first, last = found.fetchone()
        if first is not None:
            connection.execute("UPDATE steps SET retracted = 1 WHERE step > ?", (step,))
            connection.execute(_DELETE_VALUES, (first, last))
            rebuild_rollups(connection, first, last)

    return write


def hide_events(after: int) -> Write:
    """Give the events above a number that is shown nowhere: they happened, in a run that another node led."""

    def write(connection: sqlite3.Connection) -> None:
        connection.execute("UPDATE OR REPLACE events SET id = -id WHERE id > ?", (after,))

    return write


def drifts(step: int, at: float, found: Mapping[int, float]) -> Write:
    """By rank."""

    def write(connection: sqlite3.Connection) -> None:
        rows = [(rank, step, at, drift) for rank, drift in found.items()]
        connection.executemany("INSERT OR IGNORE INTO drifts VALUES (?, ?, ?, ?)", rows)

    return write


def event(happened: Event) -> Write:
    g = happened.generation
    return _insert(
        "events",
        (
            happened.id,
            happened.at,
            happened.kind,
            happened.severity,
            happened.by,
            happened.text,
            happened.step,
            g and g.term,
            g and g.n,
            happened.command,
            happened.verb,
            happened.before,
            happened.after,
            happened.outcome,
            msgspec.msgpack.encode(happened.data),
            happened.undoes,
        ),
    )


def evaluation(made: Evaluation) -> Write:
    def write(connection: sqlite3.Connection) -> None:
        known = "SELECT 1 FROM evaluations WHERE step = ? AND at = ?"
        if connection.execute(known, (made.step, made.at)).fetchone() is None:
            row = (made.step, made.at, made.loss, column_value(made.weight), column_value(made.seconds))
            connection.execute(_insertion("evaluations", row), row)
            rows = [(name, made.step, made.at, value) for name, value in made.values.items()]
            connection.executemany("INSERT OR IGNORE INTO evaluation_values VALUES (?, ?, ?, ?)", rows)

    return write


def pairs(made: HeldOutPairs) -> Write:
    return _insert("held_out_pairs", (made.step, made.at, encode(KeptPairs(pairs=made))))


def sample(made: Sample) -> Write:
    return _insert("samples", (made.at, made.number, made.step, encode(made)))


def host(reading: HostReading, oldest_kept_at: float) -> Write:
    row = (
        reading.read_at,
        reading.node,
        reading.cpu_percent,
        reading.memory_used_bytes,
        reading.disk_free_bytes,
        encode(reading),
    )

    def write(connection: sqlite3.Connection) -> None:
        connection.execute(_insertion("host", row), row)
        # The two oldest at a time: it catches up with any backlog and never holds up the loop.
        connection.execute(
            "DELETE FROM host WHERE rowid IN (SELECT rowid FROM host ORDER BY rowid LIMIT 2) AND at < ?",
            (oldest_kept_at,),
        )

    return write


def meta(key: str, value: str) -> Write:
    def write(connection: sqlite3.Connection) -> None:
        connection.execute("REPLACE INTO meta VALUES (?, ?)", (key, value))

    return write


def _insert(table: str, row: tuple[Any, ...]) -> Write:
    def write(connection: sqlite3.Connection) -> None:
        connection.execute(_insertion(table, row), row)

    return write


def _insertion(table: str, row: Sequence[Any]) -> str:
    return f"INSERT OR IGNORE INTO {table} VALUES ({', '.join('?' * len(row))})"  # noqa: S608  constants of this file


def _step_row(step: StepCommitted) -> tuple[Any, ...]:
    g = step.generation
    return (
        step.step,
        g.term,
        g.n,
        step.committed_at,
        _or_not_given(step.loss),
        column_value(step.weight),
        step.samples,
        column_value(step.learning_rate),
        _or_not_given(step.grad_norm),
        step.cursor,
        step.global_batch,
        step.plan_version,
        column_value(step.step_seconds),
        column_value(step.tokens_total),
        step.skipped,
        0,
        step.tokens,
        column_value(step.weight_total),
        column_value(step.seconds_total),
    )


def _rank_row(part: RankStep, finished_at: float) -> Row:
    return rank_row(part, part.node, part.tokens, part.samples, part.weight, finished_at)


def _as_read(row: tuple[Any, ...]) -> tuple[Any, ...]:
    """A row as SQLite gives it back, where NaN is NULL."""
    return tuple(None if value != value else value for value in row)


def _or_not_given(value: float | None) -> float | str:
    """For the columns in which NULL is a NaN."""
    return NOT_GIVEN if value is None else value
