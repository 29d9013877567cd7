"""Scripted faults of a played recording: the same faults at the same steps each time; pure.

A rank slows down as it grows hot, a node is lost and comes back, the loss jumps once, and the lead is away for a while.
All are placed by the recording's length and happen once.
"""

import math
from typing import NamedTuple

from trainctl.node_agent.replay.format import RecordedEvent
from trainctl.protocol.messages import Severity
from trainctl.protocol.messages import events as e

HOT, LOST, SPIKE, AWAY = (0.22, 0.36), (0.46, 0.56), 0.68, (0.80, 0.83)
"""Where each begins and ends, as parts of the recording; the jump has only a beginning."""
COMING_BACK_STEPS = 2
SPIKE_STEPS = 10
CALM_CELSIUS, CALM_MHZ = 61.0, 1620.0


class Heat(NamedTuple):
    """How a rank's device is: its temperature, its clock, and by what its backward takes longer."""

    celsius: float
    clock_mhz: float
    slowdown: float


CALM = Heat(CALM_CELSIUS, CALM_MHZ, 1.0)


class ScriptedFaults:
    """The faults of a recording of `length` steps played by these nodes, in the order of their ranks."""

    def __init__(self, nodes: tuple[str, ...], length: int, *, faults: bool = True) -> None:
        self._nodes, self._length = nodes, length
        many = faults and len(nodes) > 1
        self.hot_rank = min(2, len(nodes) - 1) if many else None
        self.lost_rank = len(nodes) - 1 if many else None
        self._faults = faults
        self._hot, self._lost = self._span(HOT), self._span(LOST)
        self._spike = self._at(SPIKE)
        self.away = self._span(AWAY) if faults else (0, -1)

    def _at(self, part: float) -> int:
        return max(round(part * self._length), 1)

    def _span(self, parts: tuple[float, float]) -> tuple[int, int]:
        """First and last step."""
        first = self._at(parts[0])
        return first, max(self._at(parts[1]), first)

    def is_lost(self, rank: int, step: int) -> bool:
        return rank == self.lost_rank and self._lost[0] <= step <= self._lost[1]

    def is_coming_back(self, rank: int, step: int) -> bool:
        """In the last steps without it."""
        return self.is_lost(rank, step) and step > self._lost[1] - COMING_BACK_STEPS

    def is_away(self, step: int) -> bool:
        """Whether the lead's agent neither keeps nor publishes the step."""
        return self.away[0] <= step <= self.away[1]

    def generation(self, step: int) -> int:
        """Grows as a node is lost, as it comes back, and as the lead does."""
        turns = (self._lost[0], self._lost[1] + 1) if self.lost_rank is not None else ()
        return 1 + sum(step >= turn for turn in turns)

    def heat(self, rank: int, step: int) -> Heat:
        """Rises over the first third of its span, and falls over the last."""
        first, last = self._hot
        if rank != self.hot_rank or not first <= step <= last:
            return CALM
        third = max((last - first) / 3, 1.0)
        much = min((step - first + 1) / third, (last - step + 1) / third, 1.0)
        return Heat(CALM_CELSIUS + 30 * much, CALM_MHZ * (1 - 0.28 * much), 1 + 1.6 * much)

    def loss_factor(self, step: int) -> float:
        """What the recorded loss is multiplied by."""
        since = step - self._spike
        return 1 + 1.1 * math.exp(-since / 2.5) if self._faults and 0 <= since < SPIKE_STEPS else 1.0

    def happenings(self, step: int) -> tuple[RecordedEvent, ...]:
        """The events of the faults that are due when the step is committed."""
        return tuple(event for event in self._events() if event.step == step)

    def log_lines(self, step: int) -> tuple[tuple[int, str], ...]:
        """(rank, line): what the faults add to the logs of the ranks they are about."""
        named = {self._nodes[rank]: rank for rank in (self.hot_rank, self.lost_rank) if rank is not None}
        found = (event for event in self.happenings(step) if event.by == "script")
        return tuple((rank, f"step {step:,} {event.data.text}") for event in found for node, rank in named.items()
                     if isinstance(event.data, e.Notice) and f" {node} " in event.data.text)  # fmt: skip

    def _events(self) -> tuple[RecordedEvent, ...]:
        if not self._faults:
            return ()
        back = self.away[1] + 1
        found = [
            RecordedEvent(back, "warning", self._nodes[0], e.Notice("scripted: the lead's agent was away; steps "
                     f"{self.away[0]:,} to {self.away[1]:,} of the recording were not recorded", "agent")),
        ]  # fmt: skip
        if self.lost_rank is not None and self.hot_rank is not None:
            lost, hot = self._nodes[self.lost_rank], self._nodes[self.hot_rank]
            found += [
                _scripted(self._lost[0], "error", f"{lost} is lost; the others take its share"),
                _scripted(self._lost[1] + 1, "good", f"{lost} is back and up to date"),
                _scripted(self._hot[0], "warning", f"{hot} runs hot and slows down"),
                _scripted(self._hot[1] + 1, "good", f"{hot} is back to its usual speed"),
            ]
        return tuple(found)


def _scripted(step: int, severity: Severity, text: str) -> RecordedEvent:
    return RecordedEvent(step, severity, "script", e.Notice(f"scripted: {text}", "rank"))
