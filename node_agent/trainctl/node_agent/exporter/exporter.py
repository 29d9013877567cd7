"""The endpoint as an agent has it: counts what is published, and once a second shows the server how the agent is."""

import time
from typing import Any

from trainctl.node_agent.clients.queries import Surroundings
from trainctl.node_agent.exporter import counters
from trainctl.node_agent.exporter.listen_address import Place
from trainctl.node_agent.exporter.snapshot import take
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, installing


class Exporter:
    """Binds at once, and serves from `attend` on. Raises InvalidInputError where the library is missing or the place is
    taken."""

    def __init__(self, place: Place) -> None:
        self._server = _server(place)
        self._around: Surroundings | None = None
        self._totals, self._started_at = counters.Totals(), time.time()

    def attend(self, around: Surroundings, publisher: Publisher) -> None:
        """Serve this agent, and count what it publishes from here on."""
        self._around = around
        self.listen(publisher)
        self.look(None)
        self._server.start()

    @property
    def url(self) -> str:
        """What a scraper asks for."""
        return f"http://{self._server.place}/metrics"

    def listen(self, publisher: Publisher) -> None:
        """Count what is published from here on; who was told of it before still is."""
        before = publisher.on_publish

        def heard(message: m.Live) -> None:
            before(message)
            self._totals = counters.after(self._totals, message)

        publisher.on_publish = heard

    def look(self, loop_lag_seconds: float | None) -> None:
        """Show the agent as it is now; called on its event loop."""
        if self._around is not None:
            self._server.show(take(self._around, self._totals, self._started_at, loop_lag_seconds))

    def close(self) -> None:
        self._server.close()


def _server(place: Place) -> Any:
    try:
        from trainctl.node_agent.exporter.server import MetricsServer
    except ImportError:
        problem = f"needs prometheus-client; {installing('prometheus')}"
        raise InvalidInputError("--metrics", problem) from None
    return MetricsServer(place)
