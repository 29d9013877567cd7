"""The alerts of one attached run, by what its program reports: losses and gradients that are not finite, a curve that
spikes or diverges, and silence. Pure."""

import msgspec

from trainctl.node_agent.alerts.conditions import RunSnapshot
from trainctl.node_agent.alerts.evaluator import Change, Evaluator
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

_TABLE = AlertsTable(off=("stall",))
"""The usual thresholds. How long a step or an evaluation of another program takes is its own affair."""


class GuestAlerts:
    """Raise and clear the alerts of a live run. Their ids and texts name it, as the machine's stand beside them."""

    def __init__(self, view: m.RunView, now: float) -> None:
        self.run, self.name, self._suffix = view.run, view.name, f":{view.run[-100:]}"
        self._evaluator = Evaluator(_TABLE, now)

    @property
    def open(self) -> tuple[m.AlertView, ...]:
        """Open alerts, in the order in which they were raised."""
        return tuple(map(self._named, self._evaluator.open.values()))

    def heard(self, step: m.StepCommitted, now: float) -> None:
        """Take a step of the run."""
        self._evaluator.heard(step, now)

    def look(self, view: m.RunView, now: float, at: float) -> list[Change]:
        """Return what has changed since the last look, `at` in Unix seconds."""
        found = self._evaluator.look(RunSnapshot(view, {}), now, at)
        return [type(change)(self._named(change.alert)) for change in found]

    def acknowledge(self, id: str, by: str) -> bool:
        """Return whether the alert is one of these."""
        own = id.removesuffix(self._suffix)
        return own != id and self._evaluator.acknowledge(own, by) is not None

    def _named(self, alert: m.AlertView) -> m.AlertView:
        return msgspec.structs.replace(alert, id=alert.id + self._suffix, text=f"{self.name}: {alert.text}"[:400])
