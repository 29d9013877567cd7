"""Downsampling of a span of steps into about as many buckets as a screen has columns, and its query.

Buckets start at multiples of their size, so they don't move while a run grows. Up to RAW_STEPS_PER_COLUMN steps a
bucket they are made from the steps themselves; above, from the rollups, with the few steps that a rollup would take in
from outside the span read one by one: a spike is in its bucket's maximum at any zoom, and in no other's.
"""

import itertools
import operator
from collections.abc import Iterable
from typing import Final, NamedTuple

from trainctl.protocol.messages import EVALUATED
from trainctl.protocol.record.rollups import (
    AXIS_METRICS,
    DRIFT_METRIC,
    EVALUATION_METRIC,
    FINITE,
    LIVE_RANK_STEPS,
    RANK_EXPRESSIONS,
    STEP_EXPRESSIONS,
)
from trainctl.protocol.record.schema import ROLLUP_LEVELS

RAW_STEPS_PER_COLUMN: Final = 30
RAW_VALUES_PER_COLUMN: Final = 5
"""Most steps per column that are read as they are, of metrics by name: each is a row with all of the rank's values."""
_MIN_ROLLUPS_PER_COLUMN: Final = 3
"""Least rollups per column; with fewer, rounding up to whole rollups would leave too many columns empty."""


Rollup = tuple[int, int, float, float, float, float]
"""First step, count, minimum, maximum, mean and last value of a bucket."""


class Zoom(NamedTuple):
    """Buckets of `bucket_steps` steps, made from rollups of `level` steps, or from the steps themselves if it is 0."""

    bucket_steps: int
    level: int


def choose(first: int, last: int, columns: int, *, rollups: bool = True, raw_most: int = RAW_STEPS_PER_COLUMN) -> Zoom:
    """The finest zoom that shows the steps first..last in at most `columns` buckets; those of more than `raw_most`
    steps are made from rollups."""
    raw = raw_most if rollups else last + 1
    zoom = _of_size(-(-(last - first + 1) // columns), raw)
    if last // zoom.bucket_steps - first // zoom.bucket_steps < columns:
        return zoom
    # The span straddles one bucket more than it fills; one more than columns - 1 can fill always fits.
    return _of_size(-(-(last - first + 1) // (columns - 1)) if columns > 1 else last + 1, raw)


def _of_size(wanted: int, raw_most: int) -> Zoom:
    if wanted <= raw_most:
        return Zoom(wanted, 0)
    fitting = [level for level in ROLLUP_LEVELS if level * _MIN_ROLLUPS_PER_COLUMN <= wanted]
    level = max(fitting, default=ROLLUP_LEVELS[0])
    return Zoom(-(-wanted // level) * level, level)


class Pieces(NamedTuple):
    """A span as steps, then whole rollup buckets, then steps; a piece whose last is below its first is empty."""

    head_first: int
    head_last: int
    bucket_first: int
    bucket_last: int
    tail_first: int
    tail_last: int


def pieces(first: int, last: int, level: int, *, oldest: int, newest: int) -> Pieces:
    """Cut first..last for rollups of `level` steps; oldest and newest are the ends of the record.

    A rollup bucket of which the span lacks only the beginning still counts as whole if the record has no step there. A
    bucket is made once a step after it is committed.
    """
    if level == 0:
        return Pieces(first, last, 1, 0, 1, 0)
    bucket_first = first // level if first <= oldest else -(-first // level)
    bucket_last = min((last + 1) // level, newest // level) - 1
    if bucket_last < bucket_first:
        return Pieces(first, last, 1, 0, 1, 0)
    return Pieces(first, bucket_first * level - 1, bucket_first, bucket_last, (bucket_last + 1) * level, last)


def series_query(metric: str) -> str:
    """Rows (bucket, minimum, maximum, mean, last) of a metric, ascending.

    Its parameters are the fields of Pieces, `level`, `metric`, `rank` and `size`, the steps in a bucket.
    """
    if metric in AXIS_METRICS:
        return _axis_query(metric)
    steps = _steps_query(metric)
    columns = "step, 1 AS count, value AS minimum, value AS maximum, value AS mean, value AS last"
    return f"""
        WITH pieces AS MATERIALIZED (
          SELECT {columns} FROM ({steps.format(piece="head")}) WHERE {FINITE}
          UNION ALL
          SELECT bucket * bucket_steps, count, minimum, maximum, mean, last FROM rollups
          WHERE metric = :metric AND rank = :rank AND bucket_steps = :level
            AND bucket BETWEEN :bucket_first AND :bucket_last
          UNION ALL
          SELECT {columns} FROM ({steps.format(piece="tail")}) WHERE {FINITE}
        ), buckets AS MATERIALIZED (
          SELECT step / :size AS bucket, min(minimum) AS minimum, max(maximum) AS maximum,
            sum(mean * count) / sum(count) AS mean, max(step) AS newest
          FROM pieces GROUP BY 1
        )
        SELECT bucket, buckets.minimum, buckets.maximum, buckets.mean, last
        FROM buckets JOIN pieces ON pieces.step = newest ORDER BY bucket
    """  # noqa: S608  every part is a constant of this program; values are parameters


class Span(NamedTuple):
    """Steps first..last, read from rollups of `level` steps, or one by one if it is 0."""

    level: int
    first: int
    last: int


def spans(first: int, last: int, level: int, newest: int) -> list[Span]:
    """Return the spans that first..last of a metric by name is read from, in order: at `level` as far as whole buckets
    reach, and its ends at finer ones. A bucket is whole once a step after it is committed; `newest` is the last of the
    record."""
    if last < first:
        return []
    if level == 0:
        return [Span(0, first, last)]
    begin, end = -(-first // level) * level, min(last + 1, newest // level * level) // level * level
    finer = max((size for size in ROLLUP_LEVELS if size < level), default=0)
    if end <= begin:
        return spans(first, last, finer, newest)
    ends = spans(first, begin - 1, finer, newest), spans(end, last, finer, newest)
    return [*ends[0], Span(level, begin, end - 1), *ends[1]]


NAMED_ROLLUPS: Final = """
    SELECT bucket * bucket_steps, count, minimum, maximum, mean, last FROM rollups
    WHERE metric = ? AND rank = ? AND bucket_steps = ? AND bucket BETWEEN ? AND ? ORDER BY bucket
"""


def bucketed(rows: Iterable[Rollup], size: int) -> list[tuple[int, float, float, float, float]]:
    """The rows of `series_query` from ascending ones of finer buckets or single steps."""
    made: list[tuple[int, float, float, float, float]] = []
    for bucket, found in itertools.groupby(rows, lambda row: row[0] // size):
        _, counts, low, high, means, last = zip(*found, strict=True)
        made.append((bucket, min(low), max(high), sum(map(operator.mul, means, counts)) / sum(counts), last[-1]))
    return made


def _axis_query(metric: str) -> str:
    """The value at each bucket's first and last step, also where that is outside the span: two seeks a bucket however
    many steps it has."""

    def end_of(order: str) -> str:
        return f"""(SELECT {metric} FROM steps WHERE NOT retracted
          AND step BETWEEN bucket * :size AND bucket * :size + :size - 1
          ORDER BY step {order} LIMIT 1)"""  # noqa: S608  as below

    return f"""
        WITH RECURSIVE spans(bucket) AS (
          SELECT :head_first / :size UNION ALL SELECT bucket + 1 FROM spans WHERE bucket < :head_last / :size
        ), ends AS MATERIALIZED (SELECT bucket, {end_of("ASC")} AS early, {end_of("DESC")} AS late FROM spans)
        SELECT bucket, early, late, (early + late) / 2, late FROM ends WHERE early IS NOT NULL ORDER BY bucket
    """  # noqa: S608  every part is a constant of this program; values are parameters


def standing(table: str) -> str:
    """Return a condition on the rows of a table with `step` and `at`: the step that they are about was not retracted
    since. A step without any row, as 0, stands."""
    made = f"committed_at <= {table}.at"
    redone = f"SELECT 1 FROM steps s WHERE s.step = {table}.step AND NOT s.retracted AND s.{made}"  # noqa: S608
    undone = f"SELECT 1 FROM steps r WHERE r.step = {table}.step AND r.retracted AND r.{made}"  # noqa: S608
    return f"NOT (EXISTS ({undone}) AND NOT EXISTS ({redone}))"


def _steps_query(metric: str) -> str:
    between = "BETWEEN :{piece}_first AND :{piece}_last"
    # max(at) alone makes SQLite take the other columns from its row: the newest of each step.
    if metric == DRIFT_METRIC:
        newest = f"SELECT step, drift, max(at) FROM drifts WHERE rank = :rank AND step {between} GROUP BY step"  # noqa: S608
        return f"SELECT step, drift AS value FROM ({newest})"  # noqa: S608
    if metric == EVALUATION_METRIC:
        stands = f"step {between} AND {standing('evaluations')}"
        newest = f"SELECT step, loss, max(at) FROM evaluations WHERE {stands} GROUP BY step"  # noqa: S608
        return f"SELECT step, loss AS value FROM ({newest})"  # noqa: S608
    if metric in EVALUATED:
        stands = f"metric = :metric AND step {between} AND {standing('evaluation_values')}"
        newest = f"SELECT step, value, max(at) FROM evaluation_values WHERE {stands} GROUP BY step"  # noqa: S608
        return f"SELECT step, value FROM ({newest})"  # noqa: S608
    if metric in STEP_EXPRESSIONS:
        expression = STEP_EXPRESSIONS[metric]
        return f"SELECT step, {expression} AS value FROM steps WHERE NOT retracted AND step {between}"  # noqa: S608
    expression = RANK_EXPRESSIONS[metric]
    return (
        f"SELECT r.step AS step, {expression} AS value FROM {LIVE_RANK_STEPS}"  # noqa: S608
        f" WHERE r.rank = :rank AND r.step {between}"
    )
