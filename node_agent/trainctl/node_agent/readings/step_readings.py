"""Readings of machines by the step in progress when they came, so that host metrics have a step too. Pure."""

from collections import defaultdict, deque
from functools import partial

import msgspec

from trainctl.protocol.messages import HostReading, RankStep, host_values

_STEPS_KEPT = 3
"""Newest steps whose readings wait for the ranks' parts of them."""

_READINGS_KEPT = 90
"""Readings of a node that are kept whatever the steps; they come once a second."""


class _Sums:
    """Count and sum of a node's readings in one step, by device and metric, however long the step takes."""

    def __init__(self) -> None:
        self._newest: HostReading | None = None
        self._found: dict[str, dict[str, tuple[int, float]]] = {}

    def add(self, reading: HostReading) -> None:
        self._newest = reading
        for device in _devices(reading):
            found = self._found.setdefault(device, {})
            for name, value in host_values(reading, device).items():
                count, total = found.get(name, (0, 0.0))
                found[name] = count + 1, total + value

    def means(self, device: str | None) -> dict[str, float]:
        """By metric, of the machine and of the device that a rank has there."""
        newest = self._newest
        if newest is None:
            return {}
        own = next(known for known in _devices(newest) if newest.gpu_of(known) is newest.gpu_of(device))
        return {name: total / count for name, (count, total) in self._found[own].items()}


class NewestReadings:
    """The readings of each node of the last minute or so: the record has fewer."""

    def __init__(self) -> None:
        self._kept: dict[str, deque[HostReading]] = {}

    def take(self, reading: HostReading) -> None:
        """Keep a node's reading, unless it came before."""
        kept = self._kept.setdefault(reading.node, deque(maxlen=_READINGS_KEPT))
        if not kept or reading.read_at > kept[-1].read_at:
            kept.append(reading)

    @property
    def by_node(self) -> dict[str, tuple[HostReading, ...]]:
        """Oldest first."""
        return {node: tuple(kept) for node, kept in self._kept.items()}


class StepReadings:
    """Readings of each node that came while the newest steps were made."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, defaultdict[str, _Sums]] = defaultdict(partial(defaultdict, _Sums))  # step, node
        self._read_at: dict[str, float] = {}  # of each node's newest reading, which can come twice

    def take(self, reading: HostReading, step: int) -> None:
        """Keep a reading that came while `step` was made."""
        if self._read_at.get(reading.node) != reading.read_at:
            self._read_at[reading.node] = reading.read_at
            self._steps[step][reading.node].add(reading)
        for old in [known for known in self._steps if not step - _STEPS_KEPT < known <= step]:
            del self._steps[old]

    def joined(self, part: RankStep, device: str | None) -> RankStep:
        """A rank's part of a step with its machine's metrics by name, each the mean of the readings; of a step in
        which none came, the part as it is."""
        nodes = self._steps.get(part.step)
        sums = nodes.get(part.node) if nodes is not None else None
        return msgspec.structs.replace(part, values={**part.values, **sums.means(device)}) if sums else part


def _devices(reading: HostReading) -> list[str]:
    """All that a rank may have there."""
    return ["cpu", *(f"cuda:{index}" for index in range(len(reading.gpus)))]
