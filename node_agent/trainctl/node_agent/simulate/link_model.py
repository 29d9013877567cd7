"""Simulated links: what sums, state transfers and joins take. Pure."""

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from trainctl.protocol.batch.against_profile import bandwidth, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate

JOIN_SECONDS: Final = 0.3
"""Until the reducers of a group have started and connected."""
NOTICE_SECONDS: Final = 0.1
"""Until a broken connection, or the end of a process, is noticed."""
WORD_SECONDS: Final = 0.001
"""From a rank to the lead and back."""


class SimulatedLinks(NamedTuple):
    """Of all ranks; each has one, into a network that isn't the bottleneck."""

    of: Mapping[int, LinkRate]
    gradient_bytes: int
    state_bytes: int

    def sum_seconds(self, ranks: Sequence[int]) -> float:
        """Of all gradients over these ranks, in a ring; 0 for one alone."""
        if len(ranks) < 2:
            return 0.0
        return sum_seconds(self.gradient_bytes, len(ranks), [self.of[rank] for rank in ranks])

    def transfer_seconds(self, ranks: Sequence[int]) -> float:
        """Of the whole state to the ranks that are behind, over the slowest of these links."""
        slowest = min(bandwidth(self.of[rank]) for rank in ranks)
        return self.state_bytes / slowest
