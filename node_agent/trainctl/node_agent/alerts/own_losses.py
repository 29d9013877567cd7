"""Watches each rank's own loss beside the other ranks': one that stays apart reads other data, or computes wrongly.

All ranks draw their samples from one permutation, so their losses differ by chance alone, more so the fewer samples a
rank has. What is judged is a rank's difference from the median of the ranks at the same step, which one of them doesn't
move: its mean over WINDOW_STEPS steps against its own scatter from step to step. The default of 1.5 is more than ten
standard errors of that mean: with normal scatter, chance passes it in less than one of 10^9 windows. (A median over the
steps would tell more of few outliers, but of losses with few values it is chance itself.)
"""

import math
from collections import deque
from functools import partial
from statistics import fmean, stdev
from typing import NamedTuple

from trainctl.node_agent.alerts.findings import Finding, Said, median, number
from trainctl.protocol import messages as m
from trainctl.protocol.config.alert_rules import AlertsTable

WINDOW_STEPS = 50
"""Steps by which a rank is judged."""
_STEPS_BACK = 8
"""A report this many steps old shows that the run went back, and the watch starts again."""


class _Loss(NamedTuple):
    own: float  # nats per unit of weight
    middle: float  # median of the ranks at that step


class _Departure(NamedTuple):
    """What a window says of a rank."""

    own: float
    middle: float
    by: float  # mean of the differences
    scatter: float  # their standard deviation


class OwnLossWatch:
    """Takes ranks' parts as they come; a step is judged once a part of a later one is here."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._step = 0
        self._parts: dict[int, m.RankStep] = {}  # of that step, by rank
        self._windows: dict[int, deque[_Loss]] = {}

    def part(self, part: m.RankStep) -> list[Finding]:
        """What is found of the step before, at the first part of a step."""
        found: list[Finding] = []
        if part.step > self._step:
            found = self._judge_step()
            self._step, self._parts = part.step, {}
        elif part.step <= self._step - _STEPS_BACK:
            self._windows.clear()
            self._step, self._parts = part.step, {}
        if part.step == self._step and math.isfinite(part.values.get("own_loss", math.nan)):
            self._parts[part.rank] = part
        return found

    def forget(self, rank: int) -> None:
        """A rank that is out, or gone."""
        self._windows.pop(rank, None)
        self._parts.pop(rank, None)

    def _judge_step(self) -> list[Finding]:
        if len(self._parts) < 2:
            return []
        found = []
        middle = median(part.values["own_loss"] for part in self._parts.values())
        for rank, part in self._parts.items():
            window = self._windows.setdefault(rank, deque(maxlen=WINDOW_STEPS))
            window.append(_Loss(part.values["own_loss"], middle))
            if len(window) == WINDOW_STEPS:
                found.append(self._finding(part, _departure(window), alone=len(self._parts) == 2))
        return found

    def _finding(self, part: m.RankStep, found: _Departure, *, alone: bool) -> Finding:
        """With one other rank no one knows which of the two departs, and the higher loss is named."""
        table = self._table
        most = max(table.own_loss_deviations * found.scatter, table.own_loss_percent / 100 * abs(found.middle))
        above = found.by if alone else abs(found.by)
        return Finding("own-loss", above > most, above < most / 2, partial(_say, found), part.node, part.rank)


def _departure(window: deque[_Loss]) -> _Departure:
    apart = [loss.own - loss.middle for loss in window]
    own, middle = fmean(loss.own for loss in window), fmean(loss.middle for loss in window)
    return _Departure(own, middle, fmean(apart), stdev(apart))


def _say(found: _Departure) -> Said:
    percent = f" ({100 * found.by / abs(found.middle):+.0f} %)" if found.middle else ""
    spread = f"standard deviation {number(found.scatter)}"
    text = f"own loss {number(found.own)}, ranks' median {number(found.middle)}"
    return Said(text, (
        f"differs by {number(found.by)}{percent} over the last {WINDOW_STEPS} steps ({spread})",
        "check the node's data: trainctl doctor compares the nodes' files",
        "if the files match, suspect a numerical fault in the rank's precision, backend or device",
    ))  # fmt: skip
