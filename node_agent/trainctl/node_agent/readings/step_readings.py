"""Readings of machines by the step in progress when they came, so that host metrics have a step too. Pure."""

import statistics
from collections import defaultdict

import msgspec

from trainctl.protocol import messages as m

_STEPS_KEPT = 3
"""Newest steps whose readings wait for the ranks' parts of them."""


class StepReadings:
    """What came of each node while the newest steps were made."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, defaultdict[str, dict[float, m.HostReading]]] = defaultdict(
            lambda: defaultdict(dict)
        )  # by step, node, and the time at which it was read: a node's newest can come twice

    def take(self, reading: m.HostReading, step: int) -> None:
        """Keep a reading that came while `step` was made."""
        if not any(reading.read_at in nodes[reading.node] for nodes in self._steps.values()):
            self._steps[step][reading.node][reading.read_at] = reading
        for old in [known for known in self._steps if not step - _STEPS_KEPT < known <= step]:
            del self._steps[old]

    def joined(self, part: m.RankStep, device: str | None) -> m.RankStep:
        """A rank's part of a step with its machine's metrics by name, each the mean of the readings; of a step in
        which none came, the part as it is."""
        nodes = self._steps.get(part.step)
        readings = nodes.get(part.node) if nodes is not None else None
        if not readings:
            return part
        found: defaultdict[str, list[float]] = defaultdict(list)
        for reading in readings.values():
            for name, value in m.host_values(reading, device).items():
                found[name].append(value)
        means = {name: statistics.fmean(values) for name, values in found.items()}
        return msgspec.structs.replace(part, values={**part.values, **means})
