"""Where each metric comes from in a record, and the SQL that keeps its rollups.

A value that is missing, NaN or infinite (from 1e300 on) stays in its row but is in no rollup and no series.
"""

import sqlite3
from typing import Final, NamedTuple

from trainctl.protocol.messages import METRICS
from trainctl.protocol.record.schema import ROLLUP_LEVELS

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

LATER_METRICS: Final = ("busy_seconds", "data_seconds", "samples_per_second", "steps_per_second")
"""One of each set of metrics that records of an earlier program have no rollups of."""

EVALUATION_METRIC: Final = "eval_loss"
DRIFT_METRIC: Final = "drift"
AXIS_METRICS: Final = frozenset({"tokens_total", "committed_at"})
"""Columns of `steps` that only grow: a bucket's ends are sought in the table, so every record has them."""
WITHOUT_ROLLUPS: Final = frozenset({EVALUATION_METRIC, DRIFT_METRIC}) | AXIS_METRICS
"""Beside those, metrics in tables of their own, with few rows, where a step's newest row replaces those before it."""

FINITE: Final = "typeof(value) IN ('real', 'integer') AND abs(value) < 1e300"
"""Given, and below where a sum of many would be infinite itself."""

LIVE_RANK_STEPS: Final = (
    "rank_steps r JOIN steps s ON s.step = r.step AND s.term = r.term AND s.n = r.n AND NOT s.retracted"
)
"""The rank rows of steps that stand, as `r`."""


class Evaluation(NamedTuple):
    """One pass over the held-out samples."""

    step: int
    at: float  # Unix seconds
    loss: float  # nats per unit of weight; NaN if it was
    weight: float  # what the loss was divided by
    seconds: float


def _add_rollups(values: str) -> str:
    levels = ", ".join(f"({level})" for level in ROLLUP_LEVELS)
    return f"""
        WITH levels(size) AS (VALUES {levels})
        INSERT INTO rollups
          SELECT metric, rank, size, step / size, 1, value, value, value, value FROM ({values}) CROSS JOIN levels
          WHERE :level IN (0, size) AND {FINITE} ORDER BY step
        ON CONFLICT (metric, rank, bucket_steps, bucket) DO UPDATE SET
          count = count + 1, minimum = min(minimum, excluded.minimum), maximum = max(maximum, excluded.maximum),
          mean = mean + (excluded.mean - mean) / (count + 1), last = excluded.last
    """  # noqa: S608  constants of this file


_VALUES_OF = (
    "SELECT v.step, v.rank, n.name, v.value FROM metric_values v JOIN metric_names n ON n.id = v.metric"
    " WHERE v.step BETWEEN :first AND :last AND v.rank = {}"
)
_OF_RUN = [
    f"SELECT step, {RUN_RANK} AS rank, '{name}' AS metric, {sql} AS value FROM steps"  # noqa: S608
    " WHERE NOT retracted AND step BETWEEN :first AND :last"
    for name, sql in STEP_EXPRESSIONS.items()
]
_OF_RANK = [
    f"SELECT r.step AS step, r.rank AS rank, '{name}' AS metric, {sql} AS value FROM {LIVE_RANK_STEPS}"  # noqa: S608
    " WHERE r.rank = :rank AND r.step BETWEEN :first AND :last"
    for name, sql in RANK_EXPRESSIONS.items()
]
_ADD_RUN: Final = _add_rollups(" UNION ALL ".join([*_OF_RUN, _VALUES_OF.format(RUN_RANK)]))
_ADD_RANK: Final = _add_rollups(" UNION ALL ".join([*_OF_RANK, _VALUES_OF.format(":rank")]))
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


def add_run_to_rollups(connection: sqlite3.Connection, step: int) -> None:
    """Add a step that is new in `steps`; if one after it was added before, its buckets are made anew."""
    later = f"SELECT 1 FROM steps WHERE NOT retracted AND step > ? AND step < ? + {ROLLUP_LEVELS[-1]} LIMIT 1"  # noqa: S608
    if connection.execute(later, (step, step)).fetchone():
        rebuild_rollups(connection, step, step)
    else:
        connection.execute(_ADD_RUN, {"first": step, "last": step, "level": 0})


def add_rank_to_rollups(connection: sqlite3.Connection, step: int, rank: int) -> None:
    """Add a rank's part that is new in `rank_steps`; if one after it was added before, its buckets are made anew."""
    later = (
        f"SELECT 1 FROM {LIVE_RANK_STEPS}"  # noqa: S608
        f" WHERE r.rank = ? AND r.step > ? AND r.step < ? + {ROLLUP_LEVELS[-1]} LIMIT 1"
    )
    if connection.execute(later, (rank, step, step)).fetchone():
        rebuild_rollups(connection, step, step)
    else:
        connection.execute(_ADD_RANK, {"rank": rank, "first": step, "last": step, "level": 0})


def add_missing_rollups(connection: sqlite3.Connection) -> None:
    """Make the rollups anew of a record that was begun before all of `LATER_METRICS` were; slow, and once."""
    (last,) = connection.execute("SELECT max(step) FROM rank_steps").fetchone()
    known = "SELECT 1 FROM rollups WHERE metric = ? LIMIT 1"
    if last and not all(connection.execute(known, (name,)).fetchone() for name in LATER_METRICS):
        rebuild_rollups(connection, 1, last)


def rebuild_rollups(connection: sqlite3.Connection, first: int, last: int) -> None:
    """Make every bucket that holds one of the steps first..last anew, the finest from the rows that stand, each coarser
    one from the finer: about ten rows a metric and level, whatever the length of the run."""
    finer = 0
    for level in ROLLUP_LEVELS:
        low, high = first // level * level, (last // level + 1) * level - 1
        found = connection.execute("SELECT DISTINCT rank FROM rank_steps WHERE step BETWEEN ? AND ?", (low, high))
        ranks = [rank for (rank,) in found]
        span = {"level": level, "finer": finer, "low": low, "high": high, "first": low, "last": high}
        own = [name for (name,) in connection.execute("SELECT name FROM metric_names")]
        series = [{**span, "metric": name, "rank": RUN_RANK} for name in (*STEP_EXPRESSIONS, *own)]
        series += [{**span, "metric": name, "rank": rank} for name in (*RANK_EXPRESSIONS, *own) for rank in ranks]
        connection.executemany(_DELETE_ROLLUPS, series)
        if finer:
            connection.executemany(_MERGE_ROLLUPS, series)
        else:
            connection.execute(_ADD_RUN, span)
            connection.executemany(_ADD_RANK, [{**span, "rank": rank} for rank in ranks])
        finer = level
