"""The agent's exporter: counts what is published, and once a second gives the server the agent's state."""

import time
from typing import Any

from trainctl.node_agent.clients.query_context import QueryContext
from trainctl.node_agent.exporter.listen_address import ListenAddress
from trainctl.node_agent.exporter.samples import AgentSnapshot, Totals, after
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.messages import Live


class Exporter:
    """Binds at once; `attend` begins to serve. Raises InvalidInputError if its library is missing or the port taken."""

    def __init__(self, address: ListenAddress) -> None:
        self._server = _server(address)
        self._source: QueryContext | None = None
        self._totals, self._started_at = Totals(), time.time()

    def attend(self, source: QueryContext, publisher: Publisher) -> None:
        """Serve this agent, and count what it publishes from here on."""
        self._source = source
        publisher.listeners.append(self._count)
        self.look(None)
        self._server.start()

    @property
    def url(self) -> str:
        """Return what a scraper asks for."""
        return f"http://{self._server.address}/metrics"

    def _count(self, message: Live) -> None:
        self._totals = after(self._totals, message)

    def look(self, loop_lag_seconds: float | None) -> None:
        """Show the agent as it is now; called on its event loop."""
        source = self._source
        if source is None:
            return
        now, node, peers, live = time.monotonic(), source.node_view(), source.peer_views(), source.live_runs()
        self._server.show(AgentSnapshot(now, self._started_at, node, peers, live, loop_lag_seconds, self._totals))

    def close(self) -> None:
        self._server.close()


def _server(address: ListenAddress) -> Any:
    try:
        from trainctl.node_agent.exporter.server import MetricsServer
    except ImportError:
        problem = f"needs prometheus-client; {installing('prometheus')}"
        raise InvalidInputError("--metrics", problem) from None
    return MetricsServer(address)
