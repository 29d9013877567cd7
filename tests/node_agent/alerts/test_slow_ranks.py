"""Alerts on ranks and links that are slower than they were, or than when they were calibrated."""

import random
from collections.abc import Callable

import pytest
from tests.node_agent.support.alert_world import GENERATION, NODES, World
from tests.tiers import scale

from trainctl.node_agent.alerts.evaluator import Change, Evaluator, Raised
from trainctl.protocol import messages as m
from trainctl.protocol.calibration.profile import LinkRate, Pass, ProfileSummary
from trainctl.protocol.config.alert_rules import AlertsTable

SEEDS = scale("slow ranks")


def changes(seed: int, steps: int, backward: Callable[[int, int], float], noise: float = 0.02) -> list[Change]:
    """Alerts of three ranks; `backward`: seconds by rank and step, without noise."""
    chance, evaluator, found = random.Random(seed), Evaluator(AlertsTable(), 0.0), list[Change]()
    for step in range(1, steps + 1):
        for rank, node in enumerate(("studio", "mbp", "forge")):
            seconds = max(backward(rank, step) * (1 + chance.gauss(0, noise)), 0.01)
            part = m.RankStep(
                run="r", generation=m.Generation(1, 1), step=step, rank=rank, node=node, tokens=1000, samples=8,
                micro_batch=4, replays=0, step_seconds=2.0, phases=m.Phases(backward=seconds),
            )  # fmt: skip
            evaluator.heard(part, 2.0 * step)
        found += evaluator.turned(2.0 * step, 1000.0)
    return found


def test_a_rank_that_slows_by_a_tenth_is_reported_and_no_other() -> None:
    told = [changes(seed, 400, lambda rank, step: 1.1 if rank == 1 and step > 300 else 1.0) for seed in range(SEEDS)]
    raised = [[change.alert.id for change in found if isinstance(change, Raised)] for found in told]
    right = sum(ids == ["throughput:mbp:1"] for ids in raised)
    assert right >= 0.99 * SEEDS, raised
    print(f"reported {right} of {SEEDS}")


@pytest.mark.parametrize("noise", [0.02, 0.05])
def test_noise_alone_raises_nothing(noise: float) -> None:
    assert not changes(1, 100_000 if SEEDS >= 100 else 2_000, lambda rank, step: 1.0, noise)


def test_a_slower_rank_is_told_with_the_phase_that_grew_until_it_is_as_fast_as_before() -> None:
    world = World()
    world.steps(60)
    world.steps(40, 0.9)
    assert world.told == ["raised throughput:mbp:1"]
    assert world.text("throughput:mbp:1") == "+0.30 s in backward, own rate 1,099→826 tok/s (-25 %)"
    world.steps(40)
    assert world.told[-1] == "cleared throughput:mbp:1"


def test_what_slows_all_ranks_alike_is_told_once_and_of_the_one_that_is_slower_still() -> None:
    """A machine that they share is busy: an alert a rank would say nothing of any of them."""
    world, other = World(), World()
    world.steps(60, first=0.6)
    world.steps(80, 0.9, first=0.9)
    assert world.told == ["raised throughput"]
    assert world.text("throughput") == "2 of 2 ranks slowed down together; median own rate -25 %"
    world.steps(40, 1.5, first=0.9)
    assert world.told[1:] == ["raised throughput:mbp:1"]
    world.steps(80, first=0.6)
    assert sorted(world.told[2:]) == ["cleared throughput", "cleared throughput:mbp:1"]
    other.steps(60, first=0.6)
    other.steps(80, 1.5, first=0.6)
    assert other.told == ["raised throughput:mbp:1"]


@pytest.mark.parametrize(("share", "grew"), [(4, "0.50 s"), (16, "2.00 s")])
def test_a_rank_that_slows_just_after_a_rebalance_is_told_by_what_it_was(share: int, grew: str) -> None:
    world = World()
    world.steps(60)
    world.steps(10, 0.6 * share / 8, share=share)
    world.steps(60, 1.6 * share / 8, share=share)
    assert world.told == ["raised throughput:mbp:1"]
    assert world.text("throughput:mbp:1") == f"+{grew} in backward, own rate 1,099→524 tok/s (-52 %)"
    world.steps(60, 0.6 * share / 8, share=share)
    assert world.told[-1] == "cleared throughput:mbp:1"


@pytest.mark.parametrize("part", [{"micro_batch": 2}, {"share": 9}, {"share": 3}])
def test_another_micro_batch_a_small_last_pass_or_a_share_far_from_it_is_no_slower_rank(part: dict[str, int]) -> None:
    """A pass of one sample may take as long as one of four."""
    world = World()
    world.steps(60)
    world.steps(60, 0.6 if part == {"share": 3} else 0.9, **part)
    assert world.told == []


def test_to_and_fro_between_shares_what_is_compared_with_does_not_fade() -> None:
    world = World()
    world.steps(60)
    for _ in range(10):
        world.steps(5, 0.9, share=9)
        world.steps(5)
    world.steps(60, 0.9)
    assert world.told == ["raised throughput:mbp:1"]
    assert world.text("throughput:mbp:1") == "+0.30 s in backward, own rate 1,099→826 tok/s (-25 %)"


PASSES = (Pass(1, 0.2), Pass(4, 0.5), Pass(8, 0.9))
LINK = LinkRate("studio", 100e6, 120e6, 0.002)
SUM_BYTES = 40e6
SUM_SECONDS = 0.4 + 2 * 0.001
"""A sum of two ranks moves as many bytes as the gradients have, over the slower direction, and two messages."""


class CalibratedWorld(World):
    """Two ranks of which the second was calibrated, with a link to the lead."""

    def __init__(self, passes: tuple[Pass, ...] = PASSES, links: tuple[LinkRate, ...] = (LINK,)) -> None:
        super().__init__(AlertsTable(clear_seconds=5.0, off=("stall", "device-idle", "throughput")))
        self.profiles = {1: ProfileSummary(created_at=0.0, passes=passes, links=links)}
        self.chance = random.Random(1)
        self.look()

    def train(self, count: int, slower: float = 0.0, sums: float = 1.0, generation: m.Generation = GENERATION) -> None:
        """Each rank's part of so many steps; the lead's rank is the last to come, and waits for no one."""
        for _ in range(count):
            self.now += 1.0
            self.step_number += 1
            for rank, waits in ((0, 0.0), (1, 0.3)):
                seconds = (1 + slower) * self.chance.gauss(1, 0.02)
                phases = m.Phases(0.01, seconds / 3, 2 * seconds / 3, sync=sums * SUM_SECONDS + waits)
                values = {"sum_bytes": SUM_BYTES}
                self.part(rank, generation=generation, phases=phases, values=values, step_seconds=2.0)

    def ping(self, seconds: float) -> None:
        reading = m.HostReading(
            node=NODES[1], read_at=0, cpu_percent=97.0, memory_used_bytes=1, memory_total_bytes=2,
            disk_free_bytes=10**12, values={"round_trip_seconds": seconds},
        )  # fmt: skip
        self.evaluator.heard(reading, self.now)


def test_a_rank_that_is_slower_than_calibrated_is_named_with_by_how_much_and_cleared() -> None:
    world, usual = CalibratedWorld(), CalibratedWorld()
    usual.train(400, slower=0.1)
    world.ping(0.002)
    world.train(99, slower=0.3)
    assert usual.told == world.told == []
    world.train(21, slower=0.3)
    assert world.told == ["raised efficiency:mbp:1"]
    assert world.text("efficiency:mbp:1").startswith("30 % slower than calibrated: passes take 1.3")
    assert "cpu 97 %" in world.facts("efficiency:mbp:1")[1]
    world.train(200)
    assert world.told == ["raised efficiency:mbp:1", "cleared efficiency:mbp:1"]


def test_a_link_under_half_of_its_calibrated_bandwidth_is_named_with_its_round_trips() -> None:
    world = CalibratedWorld()
    world.train(200, sums=1.5)
    assert world.told == []
    world.ping(0.031)
    world.train(140, sums=2.5)
    assert world.told == ["raised link:mbp"]
    assert "at 40 % of the calibrated bandwidth: a sum takes 1.01 s, not 0.40 s" in world.text("link:mbp")
    assert "mbp: 100 MB/s when calibrated, round trip 2.0 ms then, 31.0 ms now" in world.facts("link:mbp")
    world.train(200)
    assert world.told[-1] == "cleared link:mbp"


def test_another_group_is_judged_by_its_own_sums() -> None:
    world = CalibratedWorld()
    world.train(90, sums=5.0)
    world.train(90, generation=GENERATION.next())
    assert world.told == []


@pytest.mark.parametrize("links", [(), (LinkRate("elsewhere", 1e9, 1e9),)])
def test_what_was_not_calibrated_is_not_judged(links: tuple[LinkRate, ...]) -> None:
    world = CalibratedWorld(PASSES[:1], links)
    world.train(200, slower=1.0, sums=10.0)
    assert world.told == []
