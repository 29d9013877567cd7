"""The evaluator: a run's steps, readings and states in, alerts raised and cleared out; pure, the clock is an argument.

Watches judge each observation, a hysteresis for each alert decides when it is reported: enough observations over enough
time raise an alert, and enough clear it. What is kept is bounded by the ranks and nodes of the run.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

from trainctl.node_agent.alerts import conditions
from trainctl.node_agent.alerts.conditions import Observation, RunSnapshot, StallWatch
from trainctl.node_agent.alerts.loss_curve import LossWatch, OwnLossWatch
from trainctl.node_agent.alerts.rank_health import RankHealthWatch
from trainctl.node_agent.alerts.slow_ranks import CalibratedSpeedWatch, LinkWatch, PaceWatch
from trainctl.protocol.analysis.curve import CurveJudge, CurveLimits
from trainctl.protocol.analysis.slow_ranks import BLOCK_STEPS
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.alert_rules import KINDS, AlertKind, AlertsTable
from trainctl.protocol.messages import AlertView, Generation, HostReading, RankStep, RankView, RunView, StepCommitted
from trainctl.protocol.messages.diagnosis import Finding, Mode


@dataclasses.dataclass(frozen=True)
class Rule:
    """Number of observations in a row, and seconds that they must span, that raise an alert and that clear it."""

    raise_count: int
    raise_seconds: float
    clear_count: int
    clear_seconds: float


_LEAST: Final[dict[AlertKind, tuple[int, float, int]]] = {
    "nonfinite": (1, 0.0, 20),  # steps
    "skipped": (1, 0.0, 20),  # steps
    "loss-spike": (1, 0.0, 10),  # steps, of which the detector has seen enough
    "divergence": (1, 0.0, 20),  # steps
    "clip": (1, 0.0, 20),  # steps
    "own-loss": (20, 0.0, 20),  # steps of one rank
    "kl": (1, 0.0, 1),  # looks
    "stall": (1, 0.0, 1),  # looks
    "throughput": (BLOCK_STEPS, 20.0, BLOCK_STEPS),  # steps of one rank
    "data-wait": (2, 0.0, 2),  # looks at one rank
    "clock": (10, 10.0, 10),  # readings of one machine
    "efficiency": (1, 0.0, 2),  # looks at one rank
    "link": (1, 0.0, 2),  # looks at the group
    "device-idle": (60, 60.0, 20),  # readings of one machine
    "memory": (3, 2.0, 3),  # steps of one rank
    "memory-rise": (3, 0.0, 3),  # looks at one rank
    "disk": (3, 2.0, 3),  # readings of one machine
    "record": (1, 0.0, 1),  # looks at one machine
    "node-silent": (2, 10.0, 2),  # looks
    "node-lost": (1, 0.0, 2),  # looks
    "lead-silent": (1, 0.0, 1),  # looks
}
"""By kind: observations and seconds until an alert is raised, and observations until it is cleared."""


def rules(table: AlertsTable) -> dict[AlertKind, Rule]:
    """Return the rule of each kind, as the run file has it."""
    rule_of = {kind: Rule(*least, table.clear_seconds) for kind, least in _LEAST.items()}
    rule_of["node-silent"] = dataclasses.replace(rule_of["node-silent"], raise_seconds=table.silent_seconds)
    return rule_of


class Hysteresis:
    """One alert's state. From raised to cleared it takes at least the rule's `clear_seconds`, from cleared to raised at
    least its `raise_seconds`; `now` is a reading of a monotonic clock."""

    def __init__(self, rule: Rule, *, is_open: bool = False) -> None:
        self._rule, self.is_open = rule, is_open
        self._count, self._since = 0, 0.0

    @property
    def is_idle(self) -> bool:
        """Return whether forgetting it would change nothing."""
        return not self.is_open and not self._count

    def judge(self, *, bad: bool, good: bool, now: float) -> None:
        """Count an observation. One between the thresholds, neither bad nor good, leaves the alert as it is."""
        if not (good if self.is_open else bad):
            self._count = 0
            return
        if not self._count:
            self._since = now
        self._count += 1

    def turn(self, now: float) -> bool:
        """Raise or clear the alert if it is time to; return whether that happened."""
        rule, lasted = self._rule, now - self._since
        least = (rule.clear_count, rule.clear_seconds) if self.is_open else (rule.raise_count, rule.raise_seconds)
        if self._count < least[0] or lasted < least[1]:
            return False
        self.is_open, self._count = not self.is_open, 0
        return True


BY_STEP = frozenset(
    {"throughput", "memory", "clock", "own-loss", "data-wait", "memory-rise", "device-idle", "efficiency"}
)
"""Kinds of alerts that end when their rank leaves the group."""


@dataclasses.dataclass(frozen=True)
class Raised:
    alert: AlertView


@dataclasses.dataclass(frozen=True)
class Cleared:
    alert: AlertView  # as it was raised


Change = Raised | Cleared


@dataclasses.dataclass
class _Held:
    hysteresis: Hysteresis
    newest: Observation | None


class Evaluator:
    """Judges one run. `heard` and `look` take what happens; `look` also gives what has changed since the last one."""

    def __init__(
        self,
        table: AlertsTable,
        now: float,
        open_alerts: Iterable[AlertView] = (),
        references: Mapping[str, tuple[float, ...]] | None = None,
        limits: CurveLimits | None = None,
    ) -> None:
        """`open_alerts` with their `references` are those of the agent before this one: they aren't raised again.
        `limits`: of the curve; without them those of the table."""
        self._table, self._rules = table, rules(table)
        self._modes: dict[AlertKind, Mode] = {kind: "off" if kind in table.off else "alert" for kind in KINDS}
        self._losses = LossWatch(CurveJudge(limits or CurveLimits(table)))
        self._paces, self._stalls = PaceWatch(table), StallWatch(table, now)
        self._own_losses, self._health = OwnLossWatch(table), RankHealthWatch(table)
        self._calibrated, self._links = CalibratedSpeedWatch(table), LinkWatch(table)
        self._profiles: dict[int, ProfileSummary] = {}
        self._node_profiles: dict[str, ProfileSummary] = {}
        self._lead, self._generation = "", Generation(0, 0)
        self._held: dict[str, _Held] = {}
        self._open: dict[str, AlertView] = {}
        self._hosts: dict[str, HostReading] = {}
        self._ranks: dict[int, RankView] = {}
        self._step: int | None = None
        self._last_step: int | None = None  # of the run, if it is known
        for alert in open_alerts:
            self._open[alert.id] = alert
            self._held[alert.id] = _Held(Hysteresis(self._rules[alert.kind], is_open=True), None)
            if alert.rank is not None:
                self._paces.seed(alert.kind, alert.rank, (references or {}).get(alert.id, ()))

    @property
    def open(self) -> dict[str, AlertView]:
        """Open alerts by id, in the order in which they were raised."""
        return dict(self._open)

    @property
    def references(self) -> dict[str, tuple[float, ...]]:
        """Return what open alerts are judged against, for the evaluator after this one."""
        references = {
            id: self._paces.reference(alert.kind, alert.rank)
            for id, alert in self._open.items()
            if alert.rank is not None
        }
        return {id: reference for id, reference in references.items() if reference}

    @property
    def held(self) -> int:
        """Return how many conditions are being counted."""
        return len(self._held)

    def replay(self, steps: Iterable[StepCommitted]) -> None:
        """Learn the curve from steps of the record, oldest first; they raise nothing."""
        self._losses.curve.replay(steps)

    # ------------------------------------------------------------ in

    def heard(self, message: StepCommitted | RankStep | HostReading, now: float) -> None:
        """Take a committed step, a rank's part of one, or a machine's reading."""
        match message:
            case StepCommitted():
                self._step = message.step
                self._stalls.committed(message, now)
                self._judge(self._losses.step(message), now)
            case RankStep():
                view = self._ranks.get(message.rank)
                device = view.device if view is not None else None
                found = self._paces.part(message, self._hosts.get(message.node), device)
                self._judge([*self._instead_of_clock(found), *conditions.memory(message, self._table)], now)
                self._judge([*self._own_losses.part(message), *self._health.part(message, self._last_step)], now)
                self._judge(self._against_calibration(message), now)
            case HostReading():
                self._read(message, now)

    def _against_calibration(self, part: RankStep) -> list[Observation]:
        if part.generation != self._generation:
            self._generation = part.generation
            self._links.clear()
        own = self._calibrated.part(part, self._profiles.get(part.rank), self._hosts.get(part.node))
        return [*own, *self._links.part(part, self._node_profiles, self._lead, self._hosts)]

    def _read(self, reading: HostReading, now: float) -> None:
        working = {
            rank: view.device
            for rank, view in self._ranks.items()
            if view.node == reading.node and view.state in ("run", "late")
        }
        if reading.node in self._hosts or len(self._hosts) < 64:
            self._hosts[reading.node] = reading
        of_ranks = (*self._paces.reading(reading, working), *self._health.reading(reading, working))
        self._judge([*of_ranks, *conditions.disk(reading, self._table)], now)

    def _instead_of_clock(self, found: list[Observation]) -> list[Observation]:
        """Report a slower rank once: not beside the lower clock that makes it so."""
        return [
            dataclasses.replace(one, bad=False) if f"clock:{one.node}:{one.rank}" in self._open else one
            for one in found
        ]

    def record(self, node: str, problem: str | None, now: float) -> None:
        """Take the faults of this machine's databases, a few times a second."""
        self._judge([conditions.record(node, problem)], now)

    def lead_silent(self, node: str, lead: str, silent_seconds: float, now: float, at: float) -> list[Change]:
        """Take how long a follower's lead has been silent."""
        self._judge([conditions.lead_silent(node, lead, silent_seconds, self._table)], now)
        return self.turned(now, at)

    def look(self, snapshot: RunSnapshot, now: float, at: float) -> list[Change]:
        """Take the run as it is, `at` in Unix seconds: call it a few times a second."""
        self._ranks, self._last_step = {view.rank: view for view in snapshot.view.ranks}, snapshot.view.steps
        self._lead, self._profiles = snapshot.view.lead, {**snapshot.profiles}
        nodes = {rank: view.node for rank, view in self._ranks.items()}
        self._node_profiles = {nodes[rank]: profile for rank, profile in self._profiles.items() if rank in nodes}
        for rank, view in self._ranks.items():
            if view.is_out:
                self._calibrated.forget(rank)
                self._paces.forget(rank)
                self._own_losses.forget(rank)
                self._health.forget(rank)
        found = (*conditions.nodes(snapshot), *conditions.reference_distance(snapshot.view, self._table))
        self._judge([self._stalls.look(snapshot, now), *found], now)
        for id, alert in self._open.items():
            gone = self._ranks.get(alert.rank) if alert.rank is not None else None
            if alert.rank is not None and (gone is None or (alert.kind in BY_STEP and gone.is_out)):
                self._held[id].hysteresis.judge(bad=False, good=True, now=now)
        return self.turned(now, at)

    # ------------------------------------------------------------ out

    def _judge(self, observations: Iterable[Observation], now: float) -> None:
        for seen in observations:
            if not seen.bad and not self._held:
                continue
            held = self._held.get(seen.id)
            if held is None:
                if not seen.bad:
                    continue
                held = self._held[seen.id] = _Held(Hysteresis(self._rules[seen.kind]), seen)
            held.newest = seen
            held.hysteresis.judge(bad=seen.bad, good=seen.good, now=now)
            if held.hysteresis.is_idle:
                del self._held[seen.id]

    def turned(self, now: float, at: float) -> list[Change]:
        """Return the alerts that open or close by what was heard so far."""
        changes: list[Change] = []
        for id in [id for id, alert in self._open.items() if self._modes[alert.kind] == "off"]:  # by the agent before
            del self._held[id]
            changes.append(Cleared(self._open.pop(id)))
        for id, held in list(self._held.items()):
            if not held.hysteresis.turn(now):
                continue
            if held.hysteresis.is_open and held.newest is not None:
                finding = held.newest.finding
                if finding.reaction(self._modes[held.newest.kind]) == "alert":
                    alert = self._open[id] = self._alert(held.newest, finding, at)
                    changes.append(Raised(alert))
            else:
                del self._held[id]
                changes += [Cleared(self._open.pop(id))] if id in self._open else []
        return changes

    def _alert(self, seen: Observation, finding: Finding, at: float) -> AlertView:
        facts = (*finding.evidence, *(remedy.text for remedy in finding.remedies))[:16]
        return AlertView(
            id=seen.id,
            kind=seen.kind,
            severity=KINDS[seen.kind].severity,
            text=finding.title[:400],
            raised_at=at,
            node=finding.node,
            rank=finding.rank,
            step=self._step,
            facts=facts,
        )

    def acknowledge(self, id: str, by: str) -> AlertView | None:
        """Acknowledge an alert; return it as it is then, None if there is none of that id."""
        if id in self._open:
            self._open[id] = msgspec.structs.replace(self._open[id], acknowledged_by=by)
        return self._open.get(id)


_GUEST_TABLE = AlertsTable(off=("stall",))
"""The usual thresholds. How long a step or an evaluation of another program takes is its own affair."""


class GuestAlerts:
    """Raises and clears the alerts of one attached run, by what its program reports: losses and gradients that are not
    finite, a curve that spikes or diverges, and silence. Their ids and texts name it, as the machine's stand beside
    them."""

    def __init__(self, view: RunView, now: float) -> None:
        self.run, self.name, self._suffix = view.run, view.name, f":{view.run[-100:]}"
        self._evaluator = Evaluator(_GUEST_TABLE, now)

    @property
    def open(self) -> tuple[AlertView, ...]:
        """Open alerts, in the order in which they were raised."""
        return tuple(map(self._named, self._evaluator.open.values()))

    def heard(self, step: StepCommitted, now: float) -> None:
        """Take a step of the run."""
        self._evaluator.heard(step, now)

    def look(self, view: RunView, now: float, at: float) -> list[Change]:
        """Return what has changed since the last look, `at` in Unix seconds."""
        changes = self._evaluator.look(RunSnapshot(view, {}), now, at)
        return [type(change)(self._named(change.alert)) for change in changes]

    def acknowledge(self, id: str, by: str) -> bool:
        """Return whether the alert is one of these."""
        own = id.removesuffix(self._suffix)
        return own != id and self._evaluator.acknowledge(own, by) is not None

    def _named(self, alert: AlertView) -> AlertView:
        return msgspec.structs.replace(alert, id=alert.id + self._suffix, text=f"{self.name}: {alert.text}"[:400])
