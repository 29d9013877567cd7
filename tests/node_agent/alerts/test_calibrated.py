"""Alerts on ranks and links that are slower than when they were calibrated."""

import random

import pytest
from tests.node_agent.support.alert_world import GENERATION, NODES, RUN, World

from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary
from trainctl.protocol.config.alert_rules import AlertsTable

TABLE = AlertsTable(clear_seconds=5.0, off=("stall", "device-idle", "throughput"))
PASSES = (Pass(1, 0.2), Pass(4, 0.5), Pass(8, 0.9))
LINK = LinkRate("studio", 100e6, 120e6, 0.002)
SUM_BYTES = 40e6
SUM_SECONDS = 0.4 + 2 * 0.001
"""Of two ranks: as many bytes as the gradients have, over the slower direction, and two messages."""


class CalibratedWorld(World):
    """Two ranks of which the second was calibrated, with a link to the lead."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.profiles = {1: ProfileSummary(created_at=0.0, passes=PASSES, links=(LINK,))}
        self.chance = random.Random(1)
        self.look()

    def steps(
        self, count: int, slower: float = 0.0, sum_seconds: float = SUM_SECONDS, *,
        generation: m.Generation = GENERATION, micro: int = 4, noise: float = 0.02,
    ) -> None:  # fmt: skip
        """Each rank's part of so many steps; the lead's rank is the last to come, and waits for no one."""
        for _ in range(count):
            self.now += 1.0
            self.step_number += 1
            for rank, waits in ((0, 0.0), (1, 0.3)):
                seconds = 1.0 * (1 + slower) * self.chance.gauss(1, noise)
                part = m.RankStep(
                    run=RUN, generation=generation, step=self.step_number, rank=rank, node=NODES[rank], tokens=1000,
                    samples=8, micro_batch=micro, replays=0, step_seconds=2.0, values={"sum_bytes": SUM_BYTES},
                    phases=m.Phases(0.01, seconds / 3, 2 * seconds / 3, sync=sum_seconds + waits),
                )  # fmt: skip
                self.evaluator.heard(part, self.now)
            self.look()

    def ping(self, seconds: float) -> None:
        reading = m.HostReading(
            node="mbp", read_at=0, cpu_percent=97.0, memory_used_bytes=1, memory_total_bytes=2, disk_free_bytes=10**12,
            values={"round_trip_seconds": seconds},
        )  # fmt: skip
        self.evaluator.heard(reading, self.now)


def test_a_rank_as_fast_as_calibrated_raises_nothing() -> None:
    world = CalibratedWorld()
    world.steps(400, slower=0.1)
    assert world.told == []


def test_a_rank_that_is_slower_than_calibrated_is_named_with_by_how_much_and_cleared() -> None:
    world = CalibratedWorld()
    world.ping(0.002)
    world.steps(99, slower=0.3)
    assert world.told == []
    world.steps(21, slower=0.3)
    assert world.told == ["raised efficiency:mbp:1"]
    assert world.text("efficiency:mbp:1").startswith("30 % slower than calibrated: passes take 1.3")
    assert "s, not 1" in world.text("efficiency:mbp:1")
    assert "cpu 97 %" in world.facts("efficiency:mbp:1")[1]
    world.steps(200)
    assert world.told == ["raised efficiency:mbp:1", "cleared efficiency:mbp:1"]


def test_a_few_long_passes_are_no_slower_rank() -> None:
    world = CalibratedWorld()
    for _ in range(10):
        world.steps(30)
        world.steps(8, slower=4.0)
    assert world.told == []


def test_a_micro_batch_that_was_not_calibrated_is_not_judged() -> None:
    world = CalibratedWorld()
    world.profiles = {1: ProfileSummary(created_at=0.0, passes=PASSES[:1])}
    world.look()
    world.steps(200, slower=1.0)
    assert world.told == []


def test_a_link_under_half_of_its_calibrated_bandwidth_is_named_with_its_round_trips() -> None:
    world = CalibratedWorld()
    world.steps(200, sum_seconds=1.5 * SUM_SECONDS)
    assert world.told == []
    world.ping(0.031)
    world.steps(140, sum_seconds=2.5 * SUM_SECONDS)
    assert world.told == ["raised link:mbp"]
    assert "at 40 % of the calibrated bandwidth: a sum takes 1.01 s, not 402 ms" in world.text("link:mbp")
    assert "mbp: 100 MB/s when calibrated, round trip 2.0 ms then, 31.0 ms now" in world.facts("link:mbp")
    world.steps(200)
    assert world.told[-1] == "cleared link:mbp"


def test_waits_for_a_slower_rank_are_no_slow_link() -> None:
    world = CalibratedWorld()
    for _ in range(200):
        world.steps(1, sum_seconds=SUM_SECONDS)
    assert world.told == []


def test_another_group_is_judged_by_its_own_sums() -> None:
    world = CalibratedWorld()
    world.steps(90, sum_seconds=5 * SUM_SECONDS)
    world.steps(90, sum_seconds=SUM_SECONDS, generation=GENERATION.next())
    assert world.told == []


@pytest.mark.parametrize("links", [(), (LinkRate("elsewhere", 1e9, 1e9),)])
def test_without_a_calibrated_link_nothing_is_said_of_it(links: tuple[LinkRate, ...]) -> None:
    world = CalibratedWorld()
    world.profiles = {1: ProfileSummary(created_at=0.0, passes=PASSES, links=links)}
    world.look()
    world.steps(200, sum_seconds=10 * SUM_SECONDS)
    assert world.told == []
