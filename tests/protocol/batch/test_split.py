"""The split of a batch: whole samples by weights, the best shares by step models, and cores that ranks share."""

import itertools
import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.cluster.run_files import small_run
from tests.protocol.support import uneven_clusters
from tests.protocol.support.uneven_clusters import step_seconds
from tests.tiers import scale

from trainctl.protocol.batch.pass_curve import PassCurve
from trainctl.protocol.batch.split import (
    Machine,
    ShareCost,
    apportion,
    lower_bound,
    share_cores,
    slowest,
    split,
    spread,
)
from trainctl.protocol.batch.step_model import StepModel
from trainctl.protocol.calibration.profile import settings_digest
from trainctl.protocol.config import run_file
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


def test_large_clusters_are_never_far_behind_even_and_proportional_shares() -> None:
    parts: list[float] = []
    for seed in range(SEEDS):
        chance = random.Random(seed)
        ranks = uneven_clusters.cluster(chance, chance.randint(5, 64))
        total = len(ranks) * chance.randint(4, 64)
        even = apportion(total, dict.fromkeys(range(len(ranks)), 1.0))
        micros = {at: rank.micro for at, rank in enumerate(ranks)}
        rates = {at: even[at] / rank.seconds(even[at], min(micros[at], even[at])) for at, rank in enumerate(ranks)}
        seconds = min(step_seconds(ranks, shares, micros) for shares in (even, apportion(total, rates)))
        seen = uneven_clusters.known(ranks, total, NOISE, chance)
        parts.append(seconds / ours(ranks, total, seen, NOISE))
    assert min(parts) >= 0.98


WEIGHTS = st.dictionaries(st.integers(0, 15), st.floats(0, 1e6), min_size=1, max_size=16)


def test_samples_are_dealt_in_proportion() -> None:
    for total, weights, counts in (
        (32, {0: 14, 1: 2}, {0: 28, 1: 4}),  # what divides without a rest is dealt just so
        (8, {0: 1, 1: 1, 2: 1}, {0: 3, 1: 3, 2: 2}),  # ties to the lower rank
        (10, {0: 0.1, 1: 0.2, 2: 0.7}, {0: 1, 1: 2, 2: 7}),
        (16, {0: 1000, 1: 1, 2: 1}, {0: 14, 1: 1, 2: 1}),  # no rank is left without
        (3, {0: 0, 1: 0, 2: 5}, {0: 1, 1: 1, 2: 1}),
    ):
        assert apportion(total, weights) == counts


@given(WEIGHTS, st.integers(0, 10_000))
def test_shares_sum_to_the_batch_and_leave_no_rank_out(weights: dict[int, float], spare: int) -> None:
    if not any(weights.values()):
        return
    total = len(weights) + spare
    counts = apportion(total, weights)
    assert counts.keys() == weights.keys()
    assert sum(counts.values()) == total
    assert min(counts.values()) >= 1
    heavier = sorted(weights, key=lambda rank: (weights[rank], -rank))
    assert all(counts[a] <= counts[b] for a, b in itertools.pairwise(heavier) if weights[a] < weights[b])


@given(WEIGHTS, st.integers(0, 10_000))
def test_what_is_spread_is_within_one_of_its_proportion(weights: dict[int, float], total: int) -> None:
    whole = sum(weights.values())
    if not whole:
        return
    counts = spread(total, weights)
    assert sum(counts.values()) == total
    assert all(abs(counts[rank] - total * weights[rank] / whole) < 1 + 1e-6 * total for rank in weights)


def test_weights_without_a_proportion_and_more_ranks_than_samples_are_refused() -> None:
    refused: tuple[dict[int, float], ...] = ({}, {0: 0.0}, {0: -1.0, 1: 2.0}, {0: float("nan")}, {0: float("inf")})
    for weights in refused:
        with pytest.raises(InvalidInputError, match="positive weight"):
            apportion(8, weights)
    with pytest.raises(InvalidInputError, match="shares: 2 samples are too few for 3 ranks"):
        apportion(2, {0: 1, 1: 1, 2: 1}, "shares")


@given(st.lists(st.integers(1, 500), min_size=1, max_size=16))
def test_what_is_a_split_already_stays_one(counts: list[int]) -> None:
    assert [*apportion(sum(counts), dict(enumerate(map(float, counts)))).values()] == counts


ONE, OTHER, UNKNOWN = Machine("boot-1", 8.0), Machine("boot-2", 4.0), Machine("", 8.0)


@pytest.mark.parametrize(
    ("tables", "machines", "threads"),
    [
        ({"a": {"shared_threads": 7}, "b": {}}, {"a": ONE, "b": OTHER}, [0, 0]),
        ({"a": {}, "b": {}}, {"a": replace(ONE, threads=3), "b": ONE}, [0, 5]),
        ({"a": {}, "b": {}}, {"a": replace(ONE, threads=3), "b": replace(ONE, threads=2)}, [0, 0]),
        ({"a": {}, "b": {}, "old": {}}, {"a": ONE, "b": ONE, "old": Machine("", 0.0)}, [0, 0, 0]),
        ({"a": {}, "b": {"backend": "mlx"}, "c": {}}, {"a": ONE, "b": ONE, "c": OTHER}, [4, 4, 0]),
        ({"a": {"threads": 5}, "b": {}, "c": {}}, {"a": ONE, "b": ONE, "c": ONE}, [0, 1, 1]),
        ({"a": {"threads": 8}, "b": {}}, {"a": ONE, "b": ONE}, [0, 1]),
        ({"a": {"env": {"OMP_NUM_THREADS": "2"}}, "b": {}}, {"a": ONE, "b": replace(ONE, cores=6.5)}, [0, 4]),
        ({"a": {}, "b": {}}, {"a": UNKNOWN, "b": UNKNOWN}, [0, 0]),
        ({"a": {}, "b": {}}, {"a": ONE}, [0, 0]),
    ],
)  # fmt: skip
def test_what_nodes_do_not_set_is_divided_among_those_that_share_cores(tmp_path, tables, machines, threads):
    shared, lines = share_cores(run_file.parse(small_run(tmp_path, nodes=tables)), machines)
    assert [table.shared_threads for table in shared.nodes.values()] == threads
    assert [table.threads for table in shared.nodes.values()] == [table.get("threads", 0) for table in tables.values()]
    assert len(lines) == (1 if any(threads) else 0)


def test_a_profile_fits_with_and_without_a_part_of_shared_cores(tmp_path):
    config = run_file.parse(small_run(tmp_path, nodes={"a": {}, "b": {}}))
    shared, _ = share_cores(config, {"a": ONE, "b": ONE})
    assert shared.nodes["a"].rank_threads == 4
    assert settings_digest(shared, "a") == settings_digest(config, "a")
