"""What a rank's step should take by its calibration."""

import msgspec
import pytest
from tools.protocol_docs import examples

from trainctl.protocol import messages as m
from trainctl.protocol.batch.against_profile import bandwidth, links_of, passes_seconds, sum_seconds
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary

PROFILE = ProfileSummary(created_at=0.0, passes=(Pass(2, 0.2), Pass(4, 0.3), Pass(8, 0.5)))
PART = examples.EXAMPLES["published by an agent"]["rank-step"]


def part(samples: int, micro: int | None, replays: int = 0) -> m.RankStep:
    return msgspec.structs.replace(PART, samples=samples, micro_batch=micro, replays=replays)


def test_passes_of_a_share_by_what_was_timed() -> None:
    for samples, micro, seconds in ((8, 4, 0.6), (10, 4, 0.8), (12, 12, 0.7), (3, 8, 0.25)):
        assert passes_seconds(part(samples, micro), PROFILE) == pytest.approx(seconds, rel=0.02)
        assert passes_seconds(part(samples, micro, replays=1), PROFILE) is None, "its passes were cut"
    for samples, unknown in ((16, 16), (8, 1), (1, 8), (8, None)):
        assert passes_seconds(part(samples, unknown), PROFILE) is None


def profile(*links: LinkRate) -> ProfileSummary:
    return ProfileSummary(created_at=0.0, passes=(Pass(1, 1.0),), links=links)


def test_a_link_is_known_from_either_end() -> None:
    first, second, other = LinkRate("a", 1e8, 2e8), LinkRate("c", 5e7, 4e7), LinkRate("c", 1.0, 1.0)
    known = links_of({"lead": profile(second), "b": profile(LinkRate("lead", 1e8, 2e8), other), "c": profile()}, "lead")
    assert known == {"c": second, "b": LinkRate("lead", 1e8, 2e8)}
    assert [bandwidth(link) for link in (first, second)] == [1e8, 4e7]


def test_a_ring_is_as_fast_as_its_slowest_link() -> None:
    fast, slow = LinkRate("a", 1e9, 1e9, 0.001), LinkRate("b", 1e8, 1e8, 0.004)
    assert sum_seconds(1e8, 2, [slow]) == pytest.approx(1.0 + 0.004)
    assert sum_seconds(1e8, 4, [fast, slow]) == pytest.approx(1.5 + 6 * 0.002)
