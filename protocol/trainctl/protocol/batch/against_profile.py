"""The time that a rank's step should take by its calibration: its passes, and the sum of gradients over its link."""

import statistics
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Final

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.calibration.profile import DeviceProfile, LinkRate, Pass, ProfileSummary
from trainctl.protocol.messages import RankStep

PASS_NOISE: Final = 0.02
"""Relative standard error of a calibrated pass; what is within it is smoothed."""
FARTHEST_FACTOR: Final = 1.5
"""Most by which whole steps may differ from their passes; more is a disturbance of the calibration."""
FARTHEST_MICRO: Final = 1.5
"""Factor over the largest calibrated micro-batch up to which the curve is believed."""


def passes_seconds(part: RankStep, profile: ProfileSummary) -> float | None:
    """Return the seconds that the passes of a rank's step took when it was calibrated; None if its micro-batch is far
    from those that were timed, isn't known, or was cut for lack of memory."""
    micro = min(part.micro_batch or 0, part.samples)
    smallest, largest = profile.passes[0].micro, profile.passes[-1].micro
    if part.replays or not smallest <= micro <= FARTHEST_MICRO * largest:
        return None
    return curve_of(profile.passes).share_seconds(part.samples, micro)


@lru_cache(maxsize=256)
def curve_of(passes: tuple[Pass, ...]) -> PassCurve:
    """Seconds of a forward and backward pass by micro-batch."""
    return PassCurve.smoothed([(one.micro, one.seconds) for one in passes], PASS_NOISE)


def step_factor(profile: DeviceProfile, curve: PassCurve) -> float:
    """Seconds of a whole step, without the update, relative to those of its passes: of the steps that were measured.
    A step also reads its data, and the passes' times are the fastest of several."""
    if not profile.grid:
        return 1.0
    effective = min(point.micro * point.accumulation for point in profile.grid)
    update = profile.optimizer_seconds or 0.0
    ratios = [(one.seconds - update) / curve.share_seconds(effective, one.micro) for one in profile.grid]
    return min(max(statistics.median(ratios), 1 / FARTHEST_FACTOR), FARTHEST_FACTOR)


def links_of(profiles: Mapping[str, ProfileSummary], lead: str) -> dict[str, LinkRate]:
    """The calibrated link between the lead's node and each other one, by that other node's name."""
    own = {link.peer: link for link in profiles[lead].links} if lead in profiles else {}
    others = {node: link for node, found in profiles.items() for link in found.links if link.peer == lead}
    return {node: link for node, link in (own | others).items() if node != lead}


def bandwidth(link: LinkRate) -> float:
    """Return the slower direction's bandwidth in bytes per second."""
    return min(link.sent_bytes_per_second, link.received_bytes_per_second)


def sent_bytes(sum_bytes: float, ranks: int) -> float:
    """Return the bytes that each rank of a ring sends for one sum."""
    return 2 * (ranks - 1) / ranks * sum_bytes


def sum_seconds(sum_bytes: float, ranks: int, links: Iterable[LinkRate]) -> float:
    """Return the seconds that it takes to sum so many bytes over ranks that are connected by these links: in a ring,
    each rank sends 2 (n - 1) / n of them, in 2 (n - 1) messages one after the other, and the slowest link holds up
    all."""
    links = [*links]
    slowest, latest = min(map(bandwidth, links)), max(link.latency_seconds or 0.0 for link in links)
    # Half of a round trip for each message.
    return 2 * (ranks - 1) * (sum_bytes / ranks / slowest + latest / 2)
