"""The evaluator: a run's steps, readings and states in, alerts raised and cleared out; pure, the clock is an argument.

Watches judge each observation, a hysteresis for each alert decides when it is reported. What is kept is bounded by the
ranks and nodes of the run.
"""

import dataclasses
from collections.abc import Iterable, Mapping

import msgspec

from trainctl.node_agent.alerts import conditions
from trainctl.node_agent.alerts.calibrated_links import LinkWatch
from trainctl.node_agent.alerts.calibrated_speed import CalibratedSpeedWatch
from trainctl.node_agent.alerts.conditions import RunSnapshot, StallWatch
from trainctl.node_agent.alerts.findings import Finding
from trainctl.node_agent.alerts.hysteresis import Hysteresis, rules
from trainctl.node_agent.alerts.loss_curve import LossWatch
from trainctl.node_agent.alerts.own_losses import OwnLossWatch
from trainctl.node_agent.alerts.rank_health import RankHealthWatch
from trainctl.node_agent.alerts.slow_ranks import PaceWatch
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.alert_rules import KINDS, AlertsTable

OUT_STATES = frozenset({"lost", "rejoining", "failed", "drained", "done"})
BY_STEP = frozenset(
    {"throughput", "memory", "clock", "own-loss", "data-wait", "memory-rise", "device-idle", "efficiency"}
)
"""Kinds of alerts that end when their rank leaves the group."""


@dataclasses.dataclass(frozen=True)
class Raised:
    alert: m.AlertView


@dataclasses.dataclass(frozen=True)
class Cleared:
    alert: m.AlertView  # as it was raised


Change = Raised | Cleared


@dataclasses.dataclass
class _Held:
    hysteresis: Hysteresis
    finding: Finding | None  # the newest


class Evaluator:
    """Of one run. `heard` and `look` take what happens; `look` also gives what has changed since the last one."""

    def __init__(
        self, table: AlertsTable, now: float, open_alerts: Iterable[m.AlertView] = (),
        references: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:  # fmt: skip
        """`open_alerts` with their `references` are those of the agent before this one: they aren't raised again."""
        self._table, self._rules = table, rules(table)
        self._losses, self._paces, self._stalls = LossWatch(table), PaceWatch(table), StallWatch(table, now)
        self._own_losses, self._health = OwnLossWatch(table), RankHealthWatch(table)
        self._calibrated, self._links = CalibratedSpeedWatch(table), LinkWatch(table)
        self._profiles: dict[int, ProfileSummary] = {}
        self._node_profiles: dict[str, ProfileSummary] = {}
        self._lead, self._generation = "", m.Generation(0, 0)
        self._held: dict[str, _Held] = {}
        self._open: dict[str, m.AlertView] = {}
        self._hosts: dict[str, m.HostReading] = {}
        self._ranks: dict[int, m.RankView] = {}
        self._step: int | None = None
        self._last_step: int | None = None  # of the run, if it is known
        for alert in open_alerts:
            self._open[alert.id] = alert
            self._held[alert.id] = _Held(Hysteresis(self._rules[alert.kind], is_open=True), None)
            if alert.rank is not None:
                self._paces.seed(alert.kind, alert.rank, (references or {}).get(alert.id, ()))

    @property
    def open(self) -> dict[str, m.AlertView]:
        """Open alerts by id, in the order in which they were raised."""
        return dict(self._open)

    @property
    def references(self) -> dict[str, tuple[float, ...]]:
        """What open alerts are judged against, for the evaluator after this one."""
        found = {
            id: self._paces.reference(alert.kind, alert.rank)
            for id, alert in self._open.items()
            if alert.rank is not None
        }
        return {id: reference for id, reference in found.items() if reference}

    @property
    def held(self) -> int:
        """How many conditions are being counted."""
        return len(self._held)

    def replay(self, steps: Iterable[m.StepCommitted]) -> None:
        """Learn the curve from steps of the record, oldest first; they raise nothing."""
        for step in steps:
            self._losses.step(step)

    # ------------------------------------------------------------ in

    def heard(self, message: m.StepCommitted | m.RankStep | m.HostReading, now: float) -> None:
        """A committed step, a rank's part of one, or a machine's reading."""
        match message:
            case m.StepCommitted():
                self._step = message.step
                self._stalls.committed(message, now)
                self._judge(self._losses.step(message), now)
            case m.RankStep():
                view = self._ranks.get(message.rank)
                device = view.device if view is not None else None
                found = self._paces.part(message, self._hosts.get(message.node), device)
                self._judge([*self._instead_of_clock(found), *conditions.memory(message, self._table)], now)
                self._judge([*self._own_losses.part(message), *self._health.part(message, self._last_step)], now)
                self._judge(self._against_calibration(message), now)
            case m.HostReading():
                self._read(message, now)

    def _against_calibration(self, part: m.RankStep) -> list[Finding]:
        if part.generation != self._generation:
            self._generation = part.generation
            self._links.clear()
        own = self._calibrated.part(part, self._profiles.get(part.rank), self._hosts.get(part.node))
        return [*own, *self._links.part(part, self._node_profiles, self._lead, self._hosts)]

    def _read(self, reading: m.HostReading, now: float) -> None:
        working = {rank: view.device for rank, view in self._ranks.items()
                   if view.node == reading.node and view.state in ("run", "late")}  # fmt: skip
        if reading.node in self._hosts or len(self._hosts) < 64:
            self._hosts[reading.node] = reading
        of_ranks = (*self._paces.reading(reading, working), *self._health.reading(reading, working))
        self._judge([*of_ranks, *conditions.disk(reading, self._table)], now)

    def _instead_of_clock(self, found: list[Finding]) -> list[Finding]:
        """A slower rank is reported once: not beside the lower clock that makes it so."""
        return [
            dataclasses.replace(finding, bad=False) if f"clock:{finding.node}:{finding.rank}" in self._open else finding
            for finding in found
        ]

    def record(self, node: str, problem: str | None, now: float) -> None:
        """Take the faults of this machine's databases, a few times a second."""
        self._judge([conditions.record(node, problem)], now)

    def lead_silent(self, node: str, lead: str, silent_seconds: float, now: float, at: float) -> list[Change]:
        """For a follower: how long its lead has been silent."""
        self._judge([conditions.lead_silent(node, lead, silent_seconds, self._table)], now)
        return self.turned(now, at)

    def look(self, snapshot: RunSnapshot, now: float, at: float) -> list[Change]:
        """The run as it is, `at` in Unix seconds: call it a few times a second."""
        self._ranks, self._last_step = {view.rank: view for view in snapshot.view.ranks}, snapshot.view.steps
        self._lead, self._profiles = snapshot.view.lead, {**snapshot.profiles}
        nodes = {rank: view.node for rank, view in self._ranks.items()}
        self._node_profiles = {nodes[rank]: profile for rank, profile in self._profiles.items() if rank in nodes}
        for rank, view in self._ranks.items():
            if view.state in OUT_STATES:
                self._calibrated.forget(rank)
                self._paces.forget(rank)
                self._own_losses.forget(rank)
                self._health.forget(rank)
        found = (*conditions.nodes(snapshot), *conditions.reference_distance(snapshot.view, self._table))
        self._judge([self._stalls.look(snapshot, now), *found], now)
        for id, alert in self._open.items():
            gone = self._ranks.get(alert.rank) if alert.rank is not None else None
            if alert.rank is not None and (gone is None or (alert.kind in BY_STEP and gone.state in OUT_STATES)):
                self._held[id].hysteresis.judge(bad=False, good=True, now=now)
        return self.turned(now, at)

    # ------------------------------------------------------------ out

    def _judge(self, findings: Iterable[Finding], now: float) -> None:
        for finding in findings:
            if finding.kind in self._table.off and finding.id not in self._open:
                continue
            held = self._held.get(finding.id)
            if held is None:
                if not finding.bad:
                    continue
                held = self._held[finding.id] = _Held(Hysteresis(self._rules[finding.kind]), finding)
            off = finding.kind in self._table.off
            held.finding = finding
            held.hysteresis.judge(bad=finding.bad and not off, good=finding.good or off, now=now)
            if held.hysteresis.is_idle:
                del self._held[finding.id]

    def turned(self, now: float, at: float) -> list[Change]:
        """What has changed by what was heard alone, for a machine that takes part in no run."""
        changes: list[Change] = []
        for id, held in list(self._held.items()):
            if not held.hysteresis.turn(now):
                continue
            if held.hysteresis.is_open and held.finding is not None:
                alert = self._open[id] = self._made(held.finding, at)
                changes.append(Raised(alert))
            else:
                del self._held[id]
                changes.append(Cleared(self._open.pop(id)))
        return changes

    def _made(self, finding: Finding, at: float) -> m.AlertView:
        said = finding.say()
        return m.AlertView(
            id=finding.id, kind=finding.kind, severity=KINDS[finding.kind].severity, text=said.text[:400],
            raised_at=at, node=finding.node, rank=finding.rank, step=self._step, facts=said.facts[:16],
        )  # fmt: skip

    def acknowledge(self, id: str, by: str) -> m.AlertView | None:
        """The alert as it is then, None if there is none of that id."""
        if id in self._open:
            self._open[id] = msgspec.structs.replace(self._open[id], acknowledged_by=by)
        return self._open.get(id)
