"""Integer arithmetic of the global batch: exact sums, and who finishes what of a batch that was left half-done."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.simulation import config

from trainctl.node_agent import planner, shares
from trainctl.node_agent.settings import Durable, RankSetting, Settings
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation, Range

WEIGHTS = st.dictionaries(st.integers(0, 15), st.floats(0, 1e6), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("total", "weights", "counts"),
    [
        (16, {0: 14, 1: 2}, {0: 14, 1: 2}),  # what divides without a rest is dealt just so
        (32, {0: 14, 1: 2}, {0: 28, 1: 4}),
        (8, {0: 1, 1: 1, 2: 1}, {0: 3, 1: 3, 2: 2}),  # ties to the lower rank
        (10, {0: 0.1, 1: 0.2, 2: 0.7}, {0: 1, 1: 2, 2: 7}),
        (16, {0: 1000, 1: 1, 2: 1}, {0: 14, 1: 1, 2: 1}),  # no rank is left without
        (3, {0: 0, 1: 0, 2: 5}, {0: 1, 1: 1, 2: 1}),
    ],
)
def test_samples_are_dealt_in_proportion(total, weights, counts):
    assert shares.apportion(total, weights) == counts


@given(WEIGHTS, st.integers(0, 10_000))
def test_shares_sum_to_the_batch_and_leave_no_rank_out(weights, spare):
    if not any(weights.values()):
        return
    total = len(weights) + spare
    counts = shares.apportion(total, weights)
    assert counts.keys() == weights.keys()
    assert sum(counts.values()) == total
    assert min(counts.values()) >= 1
    heavier = sorted(weights, key=lambda rank: (weights[rank], -rank))
    assert all(counts[a] <= counts[b] for a, b in itertools.pairwise(heavier) if weights[a] < weights[b])


@given(WEIGHTS, st.integers(0, 10_000))
def test_what_is_spread_is_within_one_of_its_proportion(weights, total):
    whole = sum(weights.values())
    if not whole:
        return
    counts = shares.spread(total, weights)
    assert sum(counts.values()) == total
    assert all(abs(counts[rank] - total * weights[rank] / whole) < 1 + 1e-6 * total for rank in weights)


@pytest.mark.parametrize("weights", [{}, {0: 0.0}, {0: -1.0, 1: 2.0}, {0: float("nan")}, {0: float("inf")}])
def test_weights_without_a_proportion_are_refused(weights):
    with pytest.raises(InvalidInputError, match="positive weight"):
        shares.apportion(8, weights)


def test_more_ranks_than_samples_are_refused_by_the_field():
    with pytest.raises(InvalidInputError, match="shares: 2 samples are fewer than the 3 ranks"):
        shares.apportion(2, {0: 1, 1: 1, 2: 1}, "shares")


def test_first_shares_give_the_rest_to_those_without_one():
    assert shares.first_shares(24, {0: 10, 1: None, 2: None}) == {0: 10, 1: 7, 2: 7}
    for wanted in ({0: 10, 1: 15}, {0: 24, 1: None}, {0: 10, 1: 10}):
        with pytest.raises(InvalidInputError, match=r"batch\.global is 24"):
            shares.first_shares(24, wanted)


# ---------------------------------------------------------------- finishing the same batch


def group(counts: dict[int, int], micro: int = 4) -> Durable:
    ranks = {rank: RankSetting("abc"[rank], share, min(micro, share or micro), "" if share else "drained")
             for rank, share in counts.items()}  # fmt: skip
    return Durable(Settings(3, sum(counts.values()), ranks), Generation(1, 5), 9, divisor=64.0)


def finished(counts: dict[int, int], held: dict[int, tuple[Range, ...]], live: dict[int, int] | None = None):
    """What is left of step 8 at position 100 for each rank, once `held` is in the accumulators."""
    plan = planner.train("run", group(counts), config(batch=24), 8, 100, ["id"])
    after = group(live or counts)
    rest = planner.finishing(plan, after, held, plan.generation)
    assert (rest.step, rest.cursor, rest.global_batch) == (8, 100, 24)
    assert (rest.finishes, rest.divisor, rest.commands) == (plan.generation, plan.divisor, ("id",))
    return {work.rank: work.ranges for work in rest.work}


def test_a_rank_that_held_half_leaves_the_other_half_to_all():
    """Shares 10/8/6: positions 100-109, 110-117, 118-123. Rank 1 did 110-113 of its own."""
    held = {0: (Range(100, 10),), 1: (Range(110, 4),), 2: (Range(118, 6),)}
    assert finished({0: 10, 1: 8, 2: 6}, held) == {
        0: (Range(114, 2),), 1: (Range(116, 1),), 2: (Range(117, 1),),
    }  # fmt: skip


def test_nothing_is_left_where_all_is_held():
    held = {0: (Range(100, 10),), 1: (Range(110, 8),), 2: (Range(118, 6),)}
    assert finished({0: 10, 1: 8, 2: 6}, held) == {0: (), 1: (), 2: ()}


def test_one_rank_alone_held_something():
    """18 are left, 7.5 / 6 / 4.5 by share: the tied remainders go to the lower rank."""
    assert finished({0: 10, 1: 8, 2: 6}, {2: (Range(118, 6),)}) == {
        0: (Range(100, 8),), 1: (Range(108, 6),), 2: (Range(114, 4),),
    }  # fmt: skip


def test_what_is_left_may_be_in_pieces():
    held = {0: (Range(102, 3), Range(107, 1)), 1: (Range(110, 8),), 2: (Range(118, 5),)}
    assert finished({0: 10, 1: 8, 2: 6}, held) == {
        0: (Range(100, 2), Range(105, 1)), 1: (Range(106, 1), Range(108, 1)), 2: (Range(109, 1), Range(123, 1)),
    }  # fmt: skip


def test_a_drained_rank_takes_no_part_in_finishing():
    held = {0: (Range(100, 10),), 1: (Range(110, 4),)}
    assert finished({0: 10, 1: 8, 2: 6}, held, live={0: 14, 1: 10, 2: 0}) == {
        0: (Range(114, 6),), 1: (Range(120, 4),),
    }  # fmt: skip
