"""The Prometheus endpoint. Its HTTP server is in threads of its own: a scraper that hangs holds up no one else.

prometheus_client's own server keeps a thread and a descriptor for each connection that says nothing, also after it is
closed, and answers a request for any Host.
"""

import copy
import socket
import threading
import time
from collections.abc import Iterable
from http.server import HTTPServer
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import MetricsHandler
from prometheus_client.registry import Collector

from trainctl.node_agent.clients.query_context import QueryContext
from trainctl.node_agent.exporter.catalogue import SPECS, Spec
from trainctl.node_agent.exporter.samples import AgentSnapshot, Histogram, Reading, Totals, readings
from trainctl.node_agent.transport.publisher import Publisher
from trainctl.protocol.config.addresses import ListenAddress, is_ip, is_loopback
from trainctl.protocol.errors import InvalidInputError

MOST_CONNECTIONS = 16
"""Most connections at once; a further one closes the oldest."""
CONNECTION_SECONDS = 10.0
"""Seconds that one connection may last in all."""
POLL_SECONDS = 0.2


def families(found: Iterable[Reading]) -> list[Metric]:
    """Readings as the library's metrics, in the catalogue's order; a metric without a reading is left out."""
    by_name: dict[str, list[Reading]] = {}
    for reading in found:
        by_name.setdefault(reading.name, []).append(reading)
    return [_family(spec, by_name[name]) for name, spec in SPECS.items() if name in by_name]


def _family(spec: Spec, found: list[Reading]) -> Metric:
    if spec.kind == "histogram":
        histogram = HistogramMetricFamily(spec.name, spec.help, labels=spec.labels)
        for reading in found:
            assert isinstance(reading.value, Histogram)
            histogram.add_metric(reading.labels, list(reading.value.buckets), reading.value.total)
        return histogram
    kind = CounterMetricFamily if spec.kind == "counter" else GaugeMetricFamily
    family = kind(spec.name, spec.help, labels=spec.labels)
    for reading in found:
        assert not isinstance(reading.value, Histogram)
        family.add_metric(reading.labels, reading.value)
    return family


class _Handler(MetricsHandler):
    timeout = CONNECTION_SECONDS  # of one read or write

    def do_GET(self) -> None:  # noqa: N802  the name that http.server calls
        """Refuse a request that a browser was led to send here, by a name that somebody else made point at loopback."""
        hosts = self.headers.get_all("Host") or ["localhost"]
        if is_loopback(self.client_address[0]) and not all(map(_is_own, hosts)):
            self.send_error(403, "Host is not a name of this machine")
            return
        super().do_GET()

    def handle(self) -> None:
        try:
            super().handle()
        except OSError:
            return  # the scraper has gone, or was too slow


def _is_own(host: str) -> bool:
    """Return whether a Host header has an IP address or a name of this machine."""
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    return is_ip(name) or name in ("localhost", socket.gethostname().lower())


class _HttpServer(ThreadingMixIn, HTTPServer):
    """Takes a bounded number of connections for a bounded time."""

    daemon_threads = True
    request_queue_size = 64
    block_on_close = False
    allow_reuse_address = True

    def __init__(self, address: ListenAddress, handler: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._open: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        super().__init__((address.host, address.port), handler)

    def server_bind(self) -> None:
        """Bind as HTTPServer does, without asking the name service for this machine's name."""
        super(HTTPServer, self).server_bind()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def get_request(self) -> tuple[Any, Any]:
        connection, address = super().get_request()
        with self._lock:
            if len(self._open) >= MOST_CONNECTIONS:
                _end(next(iter(self._open)))
            self._open[connection] = time.monotonic()
        return connection, address

    def service_actions(self) -> None:
        with self._lock:
            late = [one for one, at in self._open.items() if time.monotonic() - at > CONNECTION_SECONDS]
        for connection in late:
            _end(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def end_all(self) -> None:
        with self._lock:
            for connection in self._open:
                _end(connection)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing is printed for a connection that broke."""


def _end(connection: socket.socket) -> None:
    """Shut a connection down, so that its reader or writer continues at once."""
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # it has ended


class Exporter(Collector):
    """An agent's endpoint: counts what is published, and answers scrapes from a snapshot of the agent, one a second.

    Raises InvalidInputError naming `--metrics` if the address is taken.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._totals, self._started_at = Totals(), time.time()
        self._source: QueryContext | None = None
        self._snapshot: AgentSnapshot | None = None
        registry = CollectorRegistry()
        try:
            self._http = _HttpServer(address, _Handler.factory(registry))
        except OSError as error:
            raise InvalidInputError("--metrics", f"cannot listen at {address}: {error.strerror}") from None
        registry.register(self)
        self.url = f"http://{ListenAddress(address.host, self._http.server_port)}/metrics"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(POLL_SECONDS,), name="metrics")

    def attend(self, source: QueryContext, publisher: Publisher) -> None:
        """Begin to serve this agent, and to count what it publishes."""
        self._source = source
        publisher.listeners.append(self._totals.add)
        self.look(None)
        self._thread.start()

    def look(self, loop_lag_seconds: float | None) -> None:
        """Show the agent as it is now; called on its event loop."""
        source = self._source
        if source is None:
            return
        now, node, peers, live = time.monotonic(), source.node_view(), source.peer_views(), source.live_runs()
        totals = copy.deepcopy(self._totals)  # the server's threads read it
        self._snapshot = AgentSnapshot(now, self._started_at, node, peers, live, loop_lag_seconds, totals)

    def collect(self) -> Iterable[Metric]:
        """Return the newest snapshot's metrics; none before the first."""
        snapshot = self._snapshot
        return families(readings(snapshot, time.monotonic())) if snapshot is not None else []

    def close(self) -> None:
        """Close the endpoint and every connection to it."""
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
        self._http.end_all()
        self._http.server_close()
