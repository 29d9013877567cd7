"""Watches each rank's passes against its calibration: one that stays slower is throttled, shared or broken.

The alert on throughput compares a rank with its own best in the same run; this one also finds a rank that has been slow
from the start.
"""

from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Final, NamedTuple

from trainctl.node_agent.alerts.findings import Finding, Said, median, seconds
from trainctl.protocol import messages as m
from trainctl.protocol.batch.against_profile import passes_seconds
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.alert_rules import AlertsTable

WINDOW_STEPS: Final = 100
"""Steps by whose median a rank is judged."""
LOOK_EVERY_STEPS: Final = 20
"""Steps between two looks at a rank."""
CLEAR_PART: Final = 0.5
"""Part of the threshold below which a rank is as fast as it was."""


class _Passes(NamedTuple):
    """Of one step, in seconds."""

    took: float
    expected: float


class CalibratedSpeedWatch:
    """Takes ranks' parts of steps."""

    def __init__(self, table: AlertsTable) -> None:
        self._table = table
        self._steps: dict[int, deque[_Passes]] = {}

    def part(self, part: m.RankStep, profile: ProfileSummary | None, host: m.HostReading | None) -> list[Finding]:
        """A rank's part of a step, its calibration, and what was last read of its machine."""
        expected = passes_seconds(part, profile) if profile is not None else None
        took = part.phases.forward + part.phases.backward
        if expected is None or took <= 0:
            return []
        kept = self._steps.setdefault(part.rank, deque(maxlen=WINDOW_STEPS))
        kept.append(_Passes(took, expected))
        if len(kept) < WINDOW_STEPS or (part.step + part.rank) % LOOK_EVERY_STEPS:
            return []
        slower, most = median(one.took / one.expected for one in kept) - 1, self._table.calibrated_slower_percent / 100
        say = partial(_say, slower, [*kept], part, host)
        return [Finding("efficiency", slower > most, slower < CLEAR_PART * most, say, part.node, part.rank)]

    def forget(self, rank: int) -> None:
        """A rank that is out, or gone."""
        self._steps.pop(rank, None)


def _say(slower: float, kept: list[_Passes], part: m.RankStep, host: m.HostReading | None) -> Said:
    took, expected = median(one.took for one in kept), median(one.expected for one in kept)
    text = f"{100 * slower:.0f} % slower than calibrated: passes take {seconds(took)}, not {seconds(expected)}"
    return Said(text, (
        f"median of the last {WINDOW_STEPS} steps; {part.samples} samples with a micro-batch of {part.micro_batch}",
        *_machine(host),
        "look for other programs, a lower clock and heat; trainctl calibrate measures the device again",
    ))  # fmt: skip


def _machine(host: m.HostReading | None) -> tuple[str, ...]:
    """What its machine does."""
    if host is None:
        return ()
    known: Mapping[str, float | None] = {
        "cpu {:.0f} %": host.cpu_percent, "load {:.1f}": host.load_1min, "{:.0f} °C": host.temperature_celsius,
    }  # fmt: skip
    parts = [words.format(value) for words, value in known.items() if value is not None]
    return (f"{host.node}: {', '.join(parts)}",) if parts else ()
