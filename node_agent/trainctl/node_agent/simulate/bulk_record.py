"""The record of a simulated run: written in large transactions, because steps come far faster than in a real run.

A real run continues while its disk is full. A simulation ends instead, because nothing of it is worth keeping then.
"""

from collections.abc import Sequence

from trainctl.node_agent.records import statements as writes
from trainctl.node_agent.records.run_db import RunDb
from trainctl.node_agent.simulate.bulk_rollups import fill
from trainctl.protocol import messages as m
from trainctl.protocol.errors import RefusedError
from trainctl.protocol.record.paths import RunPaths

PARTS_KEPT, WRITES_KEPT = 40_000, 5000
"""Ranks' parts of steps, and other writes, that wait for the next transaction, at most."""


class BulkRecord(RunDb):
    """A run's record whose writes wait for `flush`. A crash loses those: the simulation is then made again."""

    def __init__(self, paths: RunPaths) -> None:
        """Raises InvalidInputError if the record can't be used."""
        super().__init__(paths, resumable=False)
        self._kept: list[writes.Write] = []
        self._steps_kept: dict[tuple[int, m.Generation], m.StepCommitted] = {}
        self._parts_kept: list[tuple[m.RankStep, float]] = []

    def commit(self, step: m.StepCommitted, ranks: Sequence[m.RankStep], finished_at: float) -> None:
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
            self._kept.append(writes.commit_many([*self._steps_kept.values()], self._parts_kept, fill))
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
