"""Integer arithmetic of the global batch: first shares, and who finishes what of a batch that was left half-done."""

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning import plans, ranges
from trainctl.node_agent.planning.durable import Durable, RankSetting, Settings
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation, Range


def test_first_shares_give_the_rest_to_those_without_one():
    assert ranges.first_shares(24, {0: 10, 1: None, 2: None}) == {0: 10, 1: 7, 2: 7}
    for wanted in ({0: 10, 1: 15}, {0: 24, 1: None}, {0: 10, 1: 10}):
        with pytest.raises(InvalidInputError, match=r"batch\.global is 24"):
            ranges.first_shares(24, wanted)


def group(counts: dict[int, int], micro: int = 4) -> Durable:
    ranks = {rank: RankSetting("abc"[rank], share, min(micro, share or micro), "" if share else "drained")
             for rank, share in counts.items()}  # fmt: skip
    return Durable(Settings(3, sum(counts.values()), ranks), Generation(1, 5), 9, divisor=64.0)


def finished(counts: dict[int, int], held: dict[int, tuple[Range, ...]], live: dict[int, int] | None = None):
    """What is left of step 8 at position 100 for each rank, once `held` is in the accumulators."""
    plan = plans.train("run", group(counts), config(batch=24), 8, 100, ["id"])
    after = group(live or counts)
    rest = plans.finishing(plan, after, held, plan.generation)
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
