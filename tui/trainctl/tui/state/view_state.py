"""The state that the screens show, as one immutable value; `reducer` makes the next one from a message."""

import datetime
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Generic, TypeVar

import msgspec

from trainctl.protocol.client.client import Connection
from trainctl.protocol.messages import (
    ACTIVE_RUN_STATES,
    METRICS,
    Alerts,
    AlertView,
    Event,
    Heartbeat,
    HostReading,
    Live,
    NodeView,
    PeerView,
    RankStep,
    RunView,
    Sample,
    Snapshot,
    StepCommitted,
    Viewer,
)
from trainctl.tui.state import series
from trainctl.tui.text import formatting


@dataclass(frozen=True)
class Clock:
    """`monotonic` measures ages; `wall` gives Unix seconds, times of day shown in `zone` (None: this machine's)."""

    zone: datetime.tzinfo | None = None

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    def time_of(self, at: float) -> str:
        """Return the time of day of Unix second `at` as it is said now: 14:31, Sat 02:02, 12 Mar 02:02."""
        return formatting.clock(at, self.wall(), self.zone)


SILENT_AFTER_SECONDS = 5.0
"""Seconds without a word after which a line that claims to be connected counts as silent."""

SeriesKey = tuple[str, int | None]
V = TypeVar("V")
Incoming = Snapshot | NodeView | Live | Heartbeat | Connection
Arrived = tuple[str, Incoming, float]
"""The node whose agent said it, what, and when it came, by the monotonic clock."""


@dataclass(frozen=True)
class Seen(Generic[V]):
    """A message and when it was true, by the monotonic clock of this program."""

    value: V
    at: float

    def age(self, now: float) -> float:
        return max(now - self.at, 0.0)


@dataclass(frozen=True)
class AgentLine:
    """The line to another node's agent."""

    connection: Connection
    heard_at: float | None = None  # when anything last came from it; None: never
    node: NodeView | None = None  # what it said about itself when it was attached to
    lag_seconds: float | None = None  # of its event loop, by its last heartbeat

    def silent_for(self, now: float) -> float | None:
        """Return seconds since it was last heard, or since it is being tried; None while the line is good."""
        since = self.heard_at if self.heard_at is not None else self.connection.since_monotonic
        return _silent_for(self.connection, since, now)


class ViewState(msgspec.Struct, frozen=True):
    """All that is known of a run by its lead's agent, and of the machines by their own. Mappings are read-only."""

    connection: Connection = Connection("connecting", 0.0)
    heard_at: float | None = None  # when anything last came from the agent
    boot: str = ""
    seq: int = 0
    node: NodeView | None = None
    run: RunView | None = None
    last_step: Seen[StepCommitted] | None = None
    steps: tuple[StepCommitted, ...] = ()  # the newest, oldest first
    ranks: Mapping[int, Seen[RankStep]] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    parts: Mapping[int, tuple[RankStep, ...]] = msgspec.field(
        default_factory=lambda: MappingProxyType({})
    )  # oldest first
    laps: Mapping[int, tuple[RankStep, ...]] = msgspec.field(
        default_factory=lambda: MappingProxyType({})
    )  # oldest first
    plan_step: int = 0  # the first known step of the present plan and generation
    peers: tuple[PeerView, ...] = ()  # the other nodes, as the agent that conducts saw them at the snapshot
    agents: Mapping[str, AgentLine] = msgspec.field(default_factory=lambda: MappingProxyType({}))  # the other nodes'
    viewers: tuple[Viewer, ...] = ()  # who else is attached to the agent that conducts
    hosts: Mapping[str, Seen[HostReading]] = msgspec.field(default_factory=lambda: MappingProxyType({}))
    heartbeat: Seen[Heartbeat] | None = None
    events: tuple[Event, ...] = ()  # oldest first
    samples: tuple[Sample, ...] = ()  # answers of the model that came live, oldest first
    alerts: Mapping[str, Alerts] = msgspec.field(
        default_factory=lambda: MappingProxyType({})
    )  # by the node that raised them
    windows: Mapping[SeriesKey, series.Window] = msgspec.field(
        default_factory=lambda: MappingProxyType({})
    )  # the whole run
    recent: Mapping[SeriesKey, series.Window] = msgspec.field(
        default_factory=lambda: MappingProxyType({})
    )  # its last steps
    lettered: bool = False  # lines and logs of ranks carry letters, where colours don't tell them apart
    revision: int = 0  # of the windows

    def silent_for(self, now: float) -> float | None:
        """Return seconds since the agent was last heard, or None while the line is good."""
        return _silent_for(self.connection, self.heard_at, now) if self.heard_at is not None else None

    def silent_agents(self, now: float) -> dict[str, float]:
        """Return the other nodes whose agents aren't heard, with the seconds since they were."""
        quiet = {node: line.silent_for(now) for node, line in self.agents.items()}
        return {node: seconds for node, seconds in quiet.items() if seconds is not None}

    @property
    def active(self) -> bool:
        """Return whether there is a run that hasn't ended."""
        return self.run is not None and self.run.state in ACTIVE_RUN_STATES

    @property
    def run_events(self) -> tuple[Event, ...]:
        """Return events of the run shown and of the agent itself, oldest first."""
        run = self.run.run if self.run else ""
        return tuple(event for event in self.events if event.run in ("", run))

    @property
    def open_alerts(self) -> tuple[AlertView, ...]:
        """Return the open alerts, those that call for somebody first, errors first among them, then the newest
        first."""
        found = [alert for told in self.alerts.values() for alert in told.alerts]
        return tuple(sorted(found, key=lambda alert: (not calls(alert), alert.severity != "error", -alert.raised_at)))

    @property
    def calling(self) -> tuple[AlertView, ...]:
        """Open alerts that nobody has acknowledged or muted."""
        return tuple(alert for alert in self.open_alerts if calls(alert))

    def window(self, metric: str, rank: int | None = None) -> series.Window:
        """Return the metric over the whole run; empty when it was never reported."""
        return self.windows.get((metric, rank)) or series.empty()

    @property
    def own_metrics(self) -> tuple[str, ...]:
        """Return the metrics of ranks that the run brings beside those of the table, by name."""
        brought = {name for seen in self.ranks.values() for name in seen.value.values}
        return tuple(sorted(brought - METRICS.keys()))

    @property
    def own_run_metrics(self) -> tuple[str, ...]:
        """Return the same of those that it has as a whole."""
        values = self.last_step.value.values if self.last_step is not None else {}
        return tuple(sorted(values.keys() - METRICS.keys()))

    def lately(self, metric: str, rank: int | None = None) -> series.Window:
        """Return the metric's last steps at the finest resolution there is."""
        return self.recent.get((metric, rank)) or series.empty()


def _silent_for(connection: Connection, heard_at: float, now: float) -> float | None:
    quiet = max(now - heard_at, 0.0)
    return quiet if connection.state != "connected" or quiet > SILENT_AFTER_SECONDS else None


def calls(alert: AlertView) -> bool:
    """Return whether it still calls for somebody."""
    return alert.acknowledged_by is None and not alert.muted


class AlertBell:
    """`on` is the switch; alerts raised while it is off don't ring later."""

    def __init__(self, *, on: bool = True) -> None:
        self.on = on
        self._known: set[tuple[str, float]] | None = None  # None until the agent has first reported

    def rings(self, state: ViewState) -> bool:
        """Return whether an alert that calls for somebody is new since the last time this was asked."""
        if state.heard_at is None or not state.boot:
            return False
        calling = {(alert.id, alert.raised_at) for alert in state.calling}
        new = calling - self._known if self._known is not None else set()
        still_open = {(alert.id, alert.raised_at) for alert in state.open_alerts}
        self._known = calling | ((self._known or set()) & still_open)
        return self.on and bool(new)
