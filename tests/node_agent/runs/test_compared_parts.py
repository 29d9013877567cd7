"""A rank's part beside its calibration, as metrics."""

import msgspec
import pytest
from tests.node_agent.support.records import part
from tests.node_agent.support.simulated_ranks import SimRank, SimWorld

from trainctl.node_agent.runs.figures import Links, compared, group_links
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary

LINK = LinkRate("a", 1e8, 1e8)
PROFILE = ProfileSummary(created_at=0.0, passes=(Pass(8, 0.2), Pass(16, 0.4)), links=(LINK,))
READY = msgspec.structs.replace(SimRank(0, SimWorld(0)).ready(), profile=PROFILE)


def test_the_speed_is_relative_to_the_calibrated_passes() -> None:
    phases = m.Phases(forward=0.25, backward=0.5)
    values = compared(msgspec.structs.replace(part(1), phases=phases), READY, Links()).values
    assert values["calibrated_speed"] == pytest.approx(0.6 / 0.75)


def test_the_sum_is_relative_to_the_calibrated_links() -> None:
    row = msgspec.structs.replace(part(1), phases=m.Phases(sync=0.5), values={"sum_bytes": 2e7})
    assert compared(row, READY, Links(2, (LINK,))).values["link_use"] == pytest.approx(0.2 / 0.5)
    assert "link_use" not in compared(row, READY, Links(2)).values


def test_links_count_only_if_each_is_calibrated() -> None:
    nodes = {0: "a", 1: "b", 2: "b"}
    assert group_links(nodes, {2: PROFILE}, "a") == Links(3, (LINK,))
    assert group_links({**nodes, 3: "c"}, {2: PROFILE}, "a") == Links(4)
    assert group_links({0: "a", 1: "a"}, {}, "a") == Links(2)


def test_without_a_calibration_the_part_stays_as_it_is() -> None:
    row = part(1)
    assert compared(row, None, Links()) is row
    assert compared(row, msgspec.structs.replace(READY, profile=None), Links()) is row
