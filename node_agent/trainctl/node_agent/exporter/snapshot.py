"""What one scrape is answered from: an agent as it was at a moment, all immutable, so any thread may read it."""

import time
from typing import NamedTuple

from trainctl.node_agent.clients.queries import LiveRun, QuerySource
from trainctl.node_agent.exporter.counters import Totals
from trainctl.protocol import messages as m


class AgentSnapshot(NamedTuple):
    """An agent at a moment."""

    taken_monotonic: float
    started_at: float  # Unix seconds
    node: m.NodeView
    peers: tuple[m.PeerView, ...]
    live: LiveRun | None  # the active run
    loop_lag_seconds: float | None
    totals: Totals


def take(source: QuerySource, totals: Totals, started_at: float, loop_lag_seconds: float | None) -> AgentSnapshot:
    """The agent as it is now; called on its event loop."""
    directory = source.run_directory(None)
    live = source.live_run(directory) if directory is not None else None
    return AgentSnapshot(
        time.monotonic(), started_at, source.node_view(), source.peer_views(), live, loop_lag_seconds, totals
    )  # fmt: skip
