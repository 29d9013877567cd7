"""The split by step models: the best there is if they are exact, near it under noise."""

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.protocol.support import batch_rules, uneven_clusters
from tests.protocol.support.uneven_clusters import step_seconds
from tests.tiers import scale

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.split import ShareCost, lower_bound, slowest, split
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.errors import InvalidInputError

SEEDS = scale("nodes' splits")
NOISE = 0.02
"""Relative standard error of each calibrated pass and reported step."""

seconds = st.floats(1e-3, 10)
curves = st.dictionaries(st.integers(1, 12), seconds, min_size=1, max_size=4).map(
    lambda points: PassCurve(tuple(points.items()))
)
models = st.builds(StepModel, curves, st.floats(0, 5), st.floats(0.5, 2))
costs = st.builds(ShareCost.at, models, st.integers(1, 12)) | st.builds(ShareCost.up_to, models, st.integers(1, 12))
groups = st.lists(costs, min_size=1, max_size=4).map(lambda found: dict(enumerate(found)))


@given(groups, st.integers(0, 8))
def test_no_other_split_is_faster(by_rank: dict[int, ShareCost], spare: int) -> None:
    total = len(by_rank) + spare
    counts = split(total, by_rank)
    assert counts.keys() == by_rank.keys()
    assert sum(counts.values()) == total
    assert min(counts.values()) >= 1
    every = itertools.product(range(1, total + 1), repeat=len(by_rank))
    best = min(slowest(dict(zip(counts, each, strict=True)), by_rank) for each in every if sum(each) == total)
    assert slowest(counts, by_rank) <= best * (1 + 1e-6)
    assert lower_bound(total, [cost.rated for cost in by_rank.values()]) <= best * (1 + 1e-6)


@given(costs, st.integers(1, 60))
def test_the_largest_share_within_a_time_is_the_inverse_of_a_share_s_time(cost: ShareCost, share: int) -> None:
    level = cost.seconds(share)
    assert cost.most(level) >= share
    assert cost.seconds(cost.most(level)) <= level * (1 + 1e-6)
    assert cost.seconds(share + 1) >= level * (1 - 1e-9)


def test_ranks_whose_rate_alone_is_known() -> None:
    for total, by_rank, counts in (
        (24, {0: (3, 1), 1: (1, 1)}, {0: 18, 1: 6}),  # the same floor for all changes nothing
        (48, {0: (60, 0.02), 1: (12, 0.2)}, {0: 42, 1: 6}),  # a floor is time that its rank has less
        (8, {0: (1, 0), 1: (1, 100)}, {0: 7, 1: 1}),  # no rank is left without
        (10_000, {0: (1.95, 0), 1: (1.03, 0)}, {0: 6544, 1: 3456}),  # shares of 65.4 and 34.6 %
    ):
        linear = {rank: ShareCost.at(StepModel.linear(*known), 8) for rank, known in by_rank.items()}
        assert split(total, linear) == counts
        with pytest.raises(InvalidInputError, match="auto: 1 samples are too few for 2 ranks"):
            split(1, linear, "auto")


def test_a_free_micro_batch_is_chosen_with_the_share() -> None:
    """A rank whose curve peaks at 4 runs passes of 4, though memory allows 32."""
    table = ((1, 180.0), (4, 278.0), (8, 265.0), (16, 240.0), (32, 210.0))
    model = StepModel(PassCurve(tuple((size, size / rate) for size, rate in table)))
    free, fixed = ShareCost.up_to(model, 32), ShareCost.at(model, 32)
    assert free.micro(32) == 4
    assert (free.micro(6), fixed.micro(6)) == (6, 32)
    assert free.seconds(32) == pytest.approx(32 / 278)
    assert fixed.seconds(32) == pytest.approx(32 / 210)


def ours(ranks: list[uneven_clusters.Rank], total: int, seen: uneven_clusters.Known, noise: float) -> float:
    """Return the seconds of a step with the split by noisy models."""
    by_rank = uneven_clusters.costs(ranks, total, seen, noise)
    shares = split(total, by_rank)
    return step_seconds(ranks, shares, {at: cost.micro(shares[at]) for at, cost in by_rank.items()})


@pytest.mark.parametrize(("noise", "worst", "fifth"), [(0.0, 0.995, 0.999), (NOISE, 0.95, 0.985)])
def test_small_clusters_come_near_the_best_of_all_splits(noise: float, worst: float, fifth: float) -> None:
    """An exact curve and eight steps with 2 % noise would reach 0.974 at worst."""
    parts = []
    for seed in range(SEEDS):
        chance = random.Random(seed)
        ranks = uneven_clusters.cluster(chance, chance.randint(2, 4))
        total = chance.randint(4 * len(ranks), 64)
        seen = uneven_clusters.known(ranks, total, noise, chance)
        parts.append(uneven_clusters.best_seconds(ranks, total) / ours(ranks, total, seen, noise))
    parts.sort()
    print(f"of the best split, {100 * noise:.0f} % noise: worst {parts[0]:.4f}, 5th {parts[len(parts) // 20]:.4f}")
    assert parts[0] >= worst
    assert parts[len(parts) // 20] >= fifth or SEEDS < 100


def test_large_clusters_are_never_far_behind_the_best_of_the_usual_rules() -> None:
    parts: list[float] = []
    for seed in range(SEEDS):
        chance = random.Random(seed)
        ranks = uneven_clusters.cluster(chance, chance.randint(5, 64))
        total = len(ranks) * chance.randint(4, 64)
        seen = uneven_clusters.known(ranks, total, NOISE, chance)
        measured = [batch_rules.Seen(*known, rank.micro) for *known, rank in zip(*seen, ranks, strict=True)]
        seconds = []
        for rule in batch_rules.RULES.values():
            dealt = rule(total, measured)
            micros = {at: dealt.micros[at] if rank.is_free else rank.micro for at, rank in enumerate(ranks)}
            seconds.append(step_seconds(ranks, dealt.shares, micros))
        parts.append(min(seconds) / ours(ranks, total, seen, NOISE))
    print(f"of the best of {', '.join(batch_rules.RULES)}: worst {min(parts):.4f}")
    assert min(parts) >= 0.98
