"""Hysteresis of alerts: enough observations over enough time raise an alert, and enough clear it."""

import dataclasses
from typing import Final

from trainctl.node_agent.alerts.rank_pace import BLOCK_STEPS
from trainctl.protocol.config.alert_rules import AlertKind, AlertsTable


@dataclasses.dataclass(frozen=True)
class Rule:
    """How many observations in a row, over at least how many seconds, raise an alert, and how many clear it."""

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
    """The rule of each kind, as the run file has it."""
    made = {kind: Rule(*least, table.clear_seconds) for kind, least in _LEAST.items()}
    made["node-silent"] = dataclasses.replace(made["node-silent"], raise_seconds=table.silent_seconds)
    return made


class Hysteresis:
    """One alert's state. From raised to cleared it takes at least the rule's `clear_seconds`, from cleared to raised at
    least its `raise_seconds`; `now` is a reading of a monotonic clock."""

    def __init__(self, rule: Rule, *, is_open: bool = False) -> None:
        self._rule, self.is_open = rule, is_open
        self._count, self._since = 0, 0.0

    @property
    def is_idle(self) -> bool:
        """Whether forgetting it would change nothing."""
        return not self.is_open and not self._count

    def judge(self, *, bad: bool, good: bool, now: float) -> None:
        """One observation. Neither bad nor good: between the thresholds, it leaves the alert as it is."""
        if not (good if self.is_open else bad):
            self._count = 0
            return
        if not self._count:
            self._since = now
        self._count += 1

    def turn(self, now: float) -> bool:
        """Whether the alert is raised, or cleared, at this moment."""
        rule, lasted = self._rule, now - self._since
        least = (rule.clear_count, rule.clear_seconds) if self.is_open else (rule.raise_count, rule.raise_seconds)
        if self._count < least[0] or lasted < least[1]:
            return False
        self.is_open, self._count = not self.is_open, 0
        return True
