"""A run that has ended, by this node's record: where that ends, and what it has beyond another node's."""

from collections.abc import Sequence
from typing import Self

from trainctl.node_agent.records import replication
from trainctl.node_agent.records.agent_db import KnownRun
from trainctl.node_agent.records.keys import DURABLE_KEY
from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol import messages as m
from trainctl.protocol.record.paths import RunPaths


class EndedRun:
    """Its record, open until it is closed. Raises InvalidInputError if that can't be used."""

    def __init__(self, row: KnownRun, rank: int | None) -> None:
        """`rank` is this node's, None if it has none."""
        self.row, self.paths, self._rank = row, RunPaths(row.directory), rank
        self._recorder = RunDb(self.paths, resumable=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._recorder.close()

    @property
    def run(self) -> str:
        return self.row.run

    @property
    def hosted(self) -> m.HostedRank:
        """How far the record goes."""
        return m.HostedRank(self.run, self._rank or 0, None, *self._recorder.newest())

    @property
    def is_conductable(self) -> bool:
        """Whether what its conductor kept was handed on to this node."""
        return self._recorder.meta(DURABLE_KEY) is not None

    def keep(self, items: Sequence[bytes]) -> list[m.KeptCommand]:
        """Keep what another node has kept; the commands among it, which are the agent's. Raises ProtocolError."""
        return replication.keep_all(self._recorder, items)

    def beyond(self, other: m.HostedRank) -> list[m.Kept]:
        """What this record has and a claimant's hasn't. Raises RefusedError if that is much."""
        return replication.beyond(self._recorder, self.paths, self.hosted, other)
