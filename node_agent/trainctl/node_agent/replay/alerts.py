"""The alerts of a played recording: the agent's own rules, over the recording's own time, so the same at any speed."""

from collections.abc import Mapping

from trainctl.node_agent.alerts.conditions import RunSnapshot
from trainctl.node_agent.alerts.evaluator import Change, Cleared, Evaluator, Raised
from trainctl.node_agent.replay import readings
from trainctl.node_agent.replay.format import RecordedEvent
from trainctl.node_agent.replay.timeline import PlayedStep, Timeline
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable
from trainctl.protocol.messages import events as e

THROUGHPUT_DROP_PERCENT = 42.0
"""Percent by which a rank must slow down: eight ranks on two cores disturb each other, and the usual threshold would
report each time."""


class PlayedAlerts:
    """What is open after each step that is played; no one is called about it."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline, self._seconds = timeline, 0.0
        self._evaluator = Evaluator(AlertsTable(throughput_drop_percent=THROUGHPUT_DROP_PERCENT), 0.0)

    @property
    def view(self) -> m.Alerts:
        return m.Alerts(node=self._timeline.nodes[0], alerts=tuple(self._evaluator.open.values()))

    def take(
        self, played_step: PlayedStep, view: m.RunView, silent: Mapping[str, str], at: float
    ) -> list[RecordedEvent]:
        """The step and a reading of each machine with it; what that raises and clears, as events."""
        timeline, step = self._timeline, played_step.step.step
        self._seconds += played_step.step.step_seconds
        for rank, node in enumerate(timeline.nodes):
            if node not in silent:
                found = readings.reading(timeline.recording, timeline.script, node, rank, step, step, at)
                self._evaluator.heard(found, self._seconds)
        self._evaluator.heard(played_step.step, self._seconds)
        for part in played_step.parts:
            self._evaluator.heard(part, self._seconds)
        changes = self._evaluator.look(RunSnapshot(view, silent), self._seconds, at)
        return [_happened(change, step) for change in changes]


def _happened(change: Change, step: int) -> RecordedEvent:
    match change:
        case Raised(alert):
            return RecordedEvent(step, alert.severity, "auto", e.AlertRaised(alert.id, alert.node, alert.text))
        case Cleared(alert):
            return RecordedEvent(step, "good", "auto", e.AlertCleared(alert.id, alert.node, alert.kind))
