"""The finest rollups of many steps at once, by numpy: some ten times faster than adding them step by step."""

import sqlite3
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trainctl.protocol.record.rollups import LIVE_RANK_STEPS, RANK_EXPRESSIONS, RUN_RANK, STEP_EXPRESSIONS
from trainctl.protocol.record.schema import ROLLUP_LEVELS

_SIZE = ROLLUP_LEVELS[0]
_LARGEST = 1e300
"""A value from here on is in no rollup."""
_OF_RUN = (
    f"SELECT step, {RUN_RANK}, {', '.join(STEP_EXPRESSIONS.values())} FROM steps"  # noqa: S608  constants
    " WHERE NOT retracted AND step BETWEEN :first AND :last ORDER BY step"
)
_OF_RANKS = (
    f"SELECT r.step, r.rank, {', '.join(RANK_EXPRESSIONS.values())} FROM {LIVE_RANK_STEPS}"  # noqa: S608
    " WHERE r.step BETWEEN :first AND :last ORDER BY r.rank, r.step"
)
_INSERTION = "INSERT INTO rollups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def fill(connection: sqlite3.Connection, span: Mapping[str, int]) -> None:
    """Add the finest rollups of all metrics with a column, of the steps first..last; there are none of these yet."""
    for query, names in ((_OF_RUN, STEP_EXPRESSIONS), (_OF_RANKS, RANK_EXPRESSIONS)):
        rows = connection.execute(query, {"first": span["first"], "last": span["last"]}).fetchall()
        if rows:
            table = np.array([[None if value == "" else value for value in row] for row in rows], dtype=np.float64)
            connection.executemany(_INSERTION, _buckets(table, list(names)))


def _buckets(table: np.ndarray[Any, Any], names: list[str]) -> Iterator[tuple[Any, ...]]:
    """Rows of `rollups`; the table's columns are step, rank and the metrics, its rows are by rank and step."""
    steps, ranks = table[:, 0].astype(np.int64), table[:, 1].astype(np.int64)
    keys = ranks * (steps[-1] + 1 + steps.max()) + steps // _SIZE
    starts = np.flatnonzero(np.concatenate(([True], keys[1:] != keys[:-1])))
    rank_of, bucket_of = ranks[starts].tolist(), (steps[starts] // _SIZE).tolist()
    numbers = np.arange(len(table))
    for column, name in enumerate(names, 2):
        values = table[:, column]
        known = np.abs(values) < _LARGEST  # false for NaN
        counts = np.add.reduceat(known, starts, dtype=np.int64)
        if not counts.any():
            continue
        low = np.minimum.reduceat(np.where(known, values, np.inf), starts).tolist()
        high = np.maximum.reduceat(np.where(known, values, -np.inf), starts).tolist()
        sums = np.add.reduceat(np.where(known, values, 0.0), starts).tolist()
        last = values[np.maximum.reduceat(np.where(known, numbers, 0), starts)].tolist()
        of_bucket = zip(rank_of, bucket_of, counts.tolist(), low, high, sums, last, strict=True)
        for rank, bucket, count, least, most, total, newest in of_bucket:
            if count:
                yield name, rank, _SIZE, bucket, count, least, most, total / count, newest
