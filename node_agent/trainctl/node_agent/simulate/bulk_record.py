"""The record of a simulated run: written in large transactions, because steps come far faster than in a real run.

A real run continues while its disk is full. A simulation ends instead, because nothing of it is worth keeping then. The
finest rollups of many steps at once are made by numpy: some ten times faster than adding them step by step.
"""

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from trainctl.node_agent.records import statements as writes
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import LIVE_RANK_STEPS, RANK_EXPRESSIONS, RUN_RANK, STEP_EXPRESSIONS
from trainctl.protocol.record.schema import ROLLUP_LEVELS

_SIZE = ROLLUP_LEVELS[0]
_LARGEST = 1e300
"""A value from here on is in no rollup."""
_OF_RUN = (
    f"SELECT step, {RUN_RANK}, {', '.join(STEP_EXPRESSIONS.values())} FROM steps"  # noqa: S608  constants
    " WHERE NOT retracted AND step BETWEEN :low AND :high ORDER BY step"
)
_OF_RANKS = (
    f"SELECT r.step, r.rank, {', '.join(RANK_EXPRESSIONS.values())} FROM {LIVE_RANK_STEPS}"  # noqa: S608
    " WHERE r.step BETWEEN :low AND :high ORDER BY r.rank, r.step"
)
_INSERTION = "INSERT INTO rollups VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)"


def _fill_rollups(connection: sqlite3.Connection, span: Mapping[str, int]) -> None:
    """Add the finest rollups of all metrics with a column, of the steps low..high; there are none of these yet."""
    for query, names in ((_OF_RUN, STEP_EXPRESSIONS), (_OF_RANKS, RANK_EXPRESSIONS)):
        rows = connection.execute(query, {"low": span["low"], "high": span["high"]}).fetchall()
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
        counted = np.abs(values) < _LARGEST  # false for NaN
        counts = np.add.reduceat(counted, starts, dtype=np.int64)
        if not counts.any():
            continue
        low = np.minimum.reduceat(np.where(counted, values, np.inf), starts).tolist()
        high = np.maximum.reduceat(np.where(counted, values, -np.inf), starts).tolist()
        sums = np.add.reduceat(np.where(counted, values, 0.0), starts).tolist()
        last = values[np.maximum.reduceat(np.where(counted, numbers, 0), starts)].tolist()
        of_bucket = zip(rank_of, bucket_of, counts.tolist(), low, high, sums, last, strict=True)
        for rank, bucket, count, least, most, total, newest in of_bucket:
            if count:
                yield name, rank, _SIZE, bucket, count, least, most, total / count, newest


PARTS_KEPT, WRITES_KEPT = 40_000, 5000
"""Ranks' parts of steps, and other writes, that wait for the next transaction, at most."""


class BulkRecord(RunDb):
    """A run's record whose writes wait for `flush`. A crash loses those: the simulation is then made again."""

    def __init__(self, paths: RunPaths) -> None:
        """Raises InvalidInputError if the record can't be used."""
        super().__init__(paths, resumable=False)
        self._kept: list[writes.Write] = []
        self._steps_kept: dict[tuple[int, messages.Generation], messages.StepCommitted] = {}
        self._parts_kept: list[tuple[messages.RankStep, float]] = []

    def commit(self, step: messages.StepCommitted, ranks: Sequence[messages.RankStep], finished_at: float) -> None:
        """Keep a step, or further parts of it, for the next transaction."""
        self._steps_kept.setdefault((step.step, step.generation), step)
        self._parts_kept += [(part, finished_at) for part in ranks]
        if len(self._parts_kept) > PARTS_KEPT:
            self.flush()

    def retract_after(self, step: int, event: int | None = None) -> None:
        self.flush()
        super().retract_after(step, event)
        self.flush()

    def flush(self) -> bool:
        """Write all that waits. Raises RefusedError if the disk refuses it."""
        if self._steps_kept or self._parts_kept:
            self._kept.append(writes.commit_many([*self._steps_kept.values()], self._parts_kept, _fill_rollups))
            self._steps_kept, self._parts_kept = {}, []
        kept, self._kept = self._kept, []
        for write in kept:
            self._writer.put(write)
        self._writer.forget_newest()
        if not self._writer.settle():
            raise RefusedError(f"{self._writer.refusal}: free some space, or give --output another folder")
        return True

    def close(self) -> None:
        """Raises RefusedError if the disk refuses what waits; the record is closed then too."""
        try:
            self.flush()
        finally:
            super().close()

    def _write(self, write: writes.Write, *, durable: bool = False) -> None:
        self._kept.append(write)
        if len(self._kept) > WRITES_KEPT:
            self.flush()
