"""Sources of each metric in a record, its packed values, and the SQL that keeps its rollups.

A bucket is made, of all metrics at once, when a step after it is committed; until then its steps are all there is.
A value that is missing, NaN or infinite (from 1e300 on) stays in its row but is in no rollup and no series.
"""

import functools
import sqlite3
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from trainctl.protocol.messages import EVALUATED, METRICS
from trainctl.protocol.record.schema import ROLLUP_LEVELS, VALUES_FROM

_DOUBLE: Final = struct.Struct("<d").unpack_from


def pack(values: Mapping[int, float]) -> tuple[bytes, bytes]:
    """`values` by the metrics' ids."""
    ids = sorted(values)
    present = sum(1 << number for number in ids)
    return present.to_bytes((present.bit_length() + 7) // 8, "little"), struct.pack(
        f"<{len(ids)}d", *map(values.__getitem__, ids)
    )


def unpack(present: bytes, body: bytes) -> dict[int, float]:
    """Return what was packed, or of a damaged record what can be read of it."""
    count = len(body) // 8
    return dict(zip(_ids(present), struct.unpack(f"<{count}d", body[: 8 * count]), strict=False))


def values_of(number: int, rows: Iterable[tuple[int, bytes, bytes]]) -> Iterator[tuple[int, float]]:
    """Step and value of one metric, of the rows (step, present, body) that have it."""
    offsets: dict[bytes, int | None] = {}
    for step, present, body in rows:
        if present not in offsets:
            ids = _ids(present)
            offsets[present] = 8 * ids.index(number) if number in ids else None
        offset = offsets[present]
        if offset is not None:
            yield step, _DOUBLE(body, offset)[0]


@functools.lru_cache(1024)
def _ids(present: bytes) -> tuple[int, ...]:
    bits = int.from_bytes(present, "little")
    return tuple(number for number in range(bits.bit_length()) if bits >> number & 1)


RUN_RANK: Final = -1
"""The rank under which the rollups keep a metric of the whole run."""


def _expressions(scope: str) -> dict[str, str]:
    return {metric.name: metric.sql for metric in METRICS.values() if metric.scope == scope and metric.sql}


STEP_EXPRESSIONS: Final = _expressions("run")
"""Metrics of a row of `steps`, in SQL."""
RANK_EXPRESSIONS: Final = _expressions("rank")
"""Metrics of a row `r` of `rank_steps`, in SQL."""

RUN_SERIES: Final = ("loss", "eval_loss", "step_seconds", "tokens_per_second")
RANK_SERIES: Final = ("busy_seconds", "own_tokens_per_second")
"""Metrics of the run, and of each rank, that a snapshot carries; all others are asked for by history requests."""

EVALUATION_METRIC: Final = "eval_loss"
DRIFT_METRIC: Final = "drift"
AXIS_METRICS: Final = frozenset({"tokens_total", "committed_at"})
"""Columns of `steps` that only grow: a bucket's ends are sought in the table, so every record has them."""
OF_EVALUATIONS: Final = frozenset({EVALUATION_METRIC}) | EVALUATED
"""Metrics that an evaluation has; one can come before the first step."""
WITHOUT_ROLLUPS: Final = frozenset({DRIFT_METRIC}) | OF_EVALUATIONS | AXIS_METRICS
"""Beside those, metrics in tables of their own, with few rows, where a step's newest row replaces those before it."""

FINITE: Final = "typeof(value) IN ('real', 'integer') AND abs(value) < 1e300"
"""True of a value that is given and small enough that a sum of many stays finite."""


def is_finite(value: float) -> bool:
    """Return whether a value is small enough that a sum of many stays finite."""
    return abs(value) < 1e300


LIVE_RANK_STEPS: Final = (
    "rank_steps r JOIN steps s ON s.step = r.step AND s.term = r.term AND s.n = r.n AND NOT s.retracted"
)
"""The rank rows of steps that are not retracted, as `r`."""

NAMED_VALUES: Final = (
    "SELECT step, present, body FROM metric_values WHERE rank = ? AND step BETWEEN ? AND ? ORDER BY step"
)
"""Selects the packed metrics by name of a rank, for the steps first..last."""


class Evaluation(NamedTuple):
    """One pass over the held-out samples."""

    step: int
    at: float  # Unix seconds
    loss: float  # nats per unit of weight; NaN if it was
    weight: float  # what the loss was divided by
    seconds: float
    values: Mapping[str, float] = {}  # metrics beside the loss, by name


def _fill_rollups(values: str) -> str:
    return f"""
        INSERT INTO rollups
          SELECT metric, rank, :level, step / :level, 1, value, value, value, value FROM ({values})
          WHERE {FINITE} ORDER BY step
        ON CONFLICT (metric, rank, bucket_steps, bucket) DO UPDATE SET
          count = count + 1, minimum = min(minimum, excluded.minimum), maximum = max(maximum, excluded.maximum),
          mean = mean + (excluded.mean - mean) / (count + 1), last = excluded.last
    """  # noqa: S608  constants of this file


_OF_RUN = [
    f"SELECT step, {RUN_RANK} AS rank, '{name}' AS metric, {sql} AS value FROM steps"  # noqa: S608
    " WHERE NOT retracted AND step BETWEEN :low AND :high"
    for name, sql in STEP_EXPRESSIONS.items()
]
_OF_RANK = [
    f"SELECT r.step AS step, r.rank AS rank, '{name}' AS metric, {sql} AS value FROM {LIVE_RANK_STEPS}"  # noqa: S608
    " WHERE r.rank = :rank AND r.step BETWEEN :low AND :high"
    for name, sql in RANK_EXPRESSIONS.items()
]
_FILL_RUN: Final = _fill_rollups(" UNION ALL ".join(_OF_RUN))
_FILL_RANK: Final = _fill_rollups(" UNION ALL ".join(_OF_RANK))
_DELETE_ROLLUPS: Final = """
    DELETE FROM rollups WHERE metric = :metric AND rank = :rank AND bucket_steps = :level
      AND bucket BETWEEN :low / :level AND :high / :level
"""
_MERGE_ROLLUPS: Final = """
    INSERT INTO rollups
      SELECT metric, rank, :level, bucket * bucket_steps / :level, count, minimum, maximum, mean, last FROM rollups
      WHERE metric = :metric AND rank = :rank AND bucket_steps = :finer
        AND bucket BETWEEN :low / :finer AND :high / :finer ORDER BY bucket
    ON CONFLICT (metric, rank, bucket_steps, bucket) DO UPDATE SET
      minimum = min(minimum, excluded.minimum), maximum = max(maximum, excluded.maximum),
      mean = mean + (excluded.mean - mean) * excluded.count / (count + excluded.count),
      count = count + excluded.count, last = excluded.last
"""


_FOLLOWING: Final = f"""
    SELECT step FROM (SELECT step, retracted FROM steps WHERE step >= ? ORDER BY step LIMIT {ROLLUP_LEVELS[-1]})
    WHERE NOT retracted LIMIT 1
"""  # noqa: S608  a few rows, however many were retracted
_BEFORE: Final = "SELECT step FROM steps WHERE NOT retracted AND step < ? ORDER BY step DESC LIMIT 1"
_RANKS_OF: Final = "SELECT DISTINCT rank FROM rank_steps WHERE step BETWEEN ? AND ?"


Fill = Callable[[sqlite3.Connection, Mapping[str, int]], None]
"""Adds the finest rollups of all metrics with a column, of the steps low..high; there are none of these yet."""


def add_run_to_rollups(connection: sqlite3.Connection, step: int) -> None:
    """Make the buckets that a step, new in `steps`, is the first one after, or again those that it comes into."""
    if (newest := _newest(connection, step)) > step:
        _roll_up(connection, step, step, newest=newest)
    else:
        for (last,) in connection.execute(_BEFORE, (step,)).fetchall():
            _roll_up(connection, last, last, newest=step)


def add_rank_to_rollups(connection: sqlite3.Connection, step: int, rank: int) -> None:
    """Make the buckets again that a rank's part, new in `rank_steps`, comes into, if they are made."""
    _roll_up(connection, step, step, newest=_newest(connection, step), ranks=(rank,))


def rebuild_rollups(connection: sqlite3.Connection, first: int, last: int, fill: Fill | None = None) -> None:
    """Make every bucket again that holds one of the steps first..last, and leave none that isn't whole any more: about
    ten rows a metric and level, whatever the length of the run."""
    kept_from = values_from(connection)
    for level in ROLLUP_LEVELS:
        low, high = first // level * level, (last // level + 1) * level - 1
        names = _names(connection).values() if low >= kept_from else ()
        _delete(connection, {"level": level, "low": low, "high": high}, names, _ranks(connection, low, high))
    _roll_up(connection, first, last, newest=_newest(connection, last), fill=fill)


def _roll_up(
    connection: sqlite3.Connection,
    first: int,
    last: int,
    *,
    newest: int,
    ranks: Sequence[int] | None = None,
    fill: Fill | None = None,
) -> None:
    """Make the buckets of the steps first..last (of all ranks and the run, or of `ranks`), but only those that
    `newest`, a later step, has made whole: the finest from the rows that stand, each coarser one from the finer. Where
    the values of metrics by name are gone, their finest buckets stay as they are."""
    finer, kept_from = 0, values_from(connection)
    for level in ROLLUP_LEVELS:
        low, high = first // level * level, min(last // level + 1, newest // level) * level - 1
        if high < low:
            break
        of = _ranks(connection, low, high) if ranks is None else ranks
        names, span = _names(connection), {"level": level, "finer": finer, "low": low, "high": high}
        _delete(connection, span, names.values() if finer or low >= kept_from else (), of)
        if finer:
            connection.executemany(_MERGE_ROLLUPS, _series(span, names.values(), of))
        else:
            _fill(connection, span, of) if fill is None else fill(connection, span)
            insertion = "INSERT OR IGNORE INTO rollups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"
            connection.executemany(insertion, _named_buckets(connection, names, low, high, of))
        finer = level


def _fill(connection: sqlite3.Connection, span: Mapping[str, int], ranks: Sequence[int]) -> None:
    if RUN_RANK in ranks:
        connection.execute(_FILL_RUN, span)
    connection.executemany(_FILL_RANK, [{**span, "rank": rank} for rank in ranks if rank != RUN_RANK])


def _delete(
    connection: sqlite3.Connection, span: Mapping[str, int], names: Iterable[str], ranks: Sequence[int]
) -> None:
    connection.executemany(_DELETE_ROLLUPS, _series(span, names, ranks))


def _ranks(connection: sqlite3.Connection, low: int, high: int) -> tuple[int, ...]:
    """Return the run and the ranks that have a part in the steps low..high."""
    return (RUN_RANK, *(rank for (rank,) in connection.execute(_RANKS_OF, (low, high))))


def _named_buckets(
    connection: sqlite3.Connection, names: Mapping[int, str], low: int, high: int, ranks: Iterable[int]
) -> Iterator[tuple[str | float, ...]]:
    """The finest rollups of the steps low..high."""
    size = ROLLUP_LEVELS[0]
    found: dict[tuple[int, int, int], list[float]] = {}
    for rank in ranks:
        for step, present, body in connection.execute(NAMED_VALUES, (rank, low, high)):
            for number, value in unpack(present, body).items():
                if is_finite(value) and number in names:
                    found.setdefault((number, rank, step // size), []).append(value)
    for (number, rank, bucket), values in found.items():
        spread = min(values), max(values), sum(values) / len(values), values[-1]
        yield names[number], rank, size, bucket, len(values), *spread


def _series(span: Mapping[str, int], names: Iterable[str], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Return the metrics with a column, and those of these names, of each rank."""
    by_name = [*names]
    return [
        {**span, "metric": metric, "rank": rank}
        for rank in ranks
        for metric in (*(STEP_EXPRESSIONS if rank == RUN_RANK else RANK_EXPRESSIONS), *by_name)
    ]


def _names(connection: sqlite3.Connection) -> dict[int, str]:
    return dict(connection.execute("SELECT id, name FROM metric_names"))


def _newest(connection: sqlite3.Connection, step: int) -> int:
    """A standing step after every bucket of `step`, else the newest one in them or before; 0 without one."""
    end = (step // ROLLUP_LEVELS[-1] + 1) * ROLLUP_LEVELS[-1]
    row = connection.execute(_FOLLOWING, (end,)).fetchone() or connection.execute(_BEFORE, (end,)).fetchone()
    return int(row[0]) if row else 0


def values_from(connection: sqlite3.Connection) -> int:
    """The first step whose metrics by name are kept, and not only their rollups; 0 while none are gone."""
    row = connection.execute("SELECT value FROM meta WHERE key = ?", (VALUES_FROM,)).fetchone()
    return int(row[0]) if row else 0
