"""Integer arithmetic of the global batch: first shares, and who finishes what of a batch that was left half-done."""

import pytest
from tests.node_agent.support.simulation import config

from trainctl.node_agent.planning import plans
from trainctl.node_agent.planning.durable import Durable, RankSetting, Settings
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Generation, Range


def test_first_shares_give_the_rest_to_those_without_one():
    assert plans.first_shares(24, {0: 10, 1: None, 2: None}) == {0: 10, 1: 7, 2: 7}
    for wanted in ({0: 10, 1: 15}, {0: 24, 1: None}, {0: 10, 1: 10}):
        with pytest.raises(InvalidInputError, match=r"batch\.global is 24"):
            plans.first_shares(24, wanted)


def group(counts: dict[int, int], micro: int = 4) -> Durable:
    ranks = {rank: RankSetting("abc"[rank], share, min(micro, share or micro), "" if share else "drained")
             for rank, share in counts.items()}  # fmt: skip
    return Durable(Settings(3, sum(counts.values()), ranks), Generation(1, 5), 9, divisor=64.0)


SHARES = {0: 10, 1: 8, 2: 6}
"""Positions 100-109, 110-117 and 118-123."""


@pytest.mark.parametrize(
    ("held", "live", "left"),
    [
        ({0: (Range(100, 10),), 1: (Range(110, 4),), 2: (Range(118, 6),)}, SHARES,
         {0: (Range(114, 2),), 1: (Range(116, 1),), 2: (Range(117, 1),)}),
        ({0: (Range(100, 10),), 1: (Range(110, 8),), 2: (Range(118, 6),)}, SHARES, {0: (), 1: (), 2: ()}),
        # 18 are left, 7.5 / 6 / 4.5 by share: the tied remainders go to the lower rank.
        ({2: (Range(118, 6),)}, SHARES, {0: (Range(100, 8),), 1: (Range(108, 6),), 2: (Range(114, 4),)}),
        ({0: (Range(102, 3), Range(107, 1)), 1: (Range(110, 8),), 2: (Range(118, 5),)}, SHARES,
         {0: (Range(100, 2), Range(105, 1)), 1: (Range(106, 1), Range(108, 1)), 2: (Range(109, 1), Range(123, 1))}),
        ({0: (Range(100, 10),), 1: (Range(110, 4),)}, {0: 14, 1: 10, 2: 0},
         {0: (Range(114, 6),), 1: (Range(120, 4),)}),  # rank 2 is drained
    ],
)  # fmt: skip
def test_what_the_accumulators_lack_of_step_8_at_position_100_is_dealt_to_all_that_live(held, live, left):
    plan = plans.PlanMaker("run", group(SHARES), config(batch=24), 8, 100, ("id",)).train()
    rest = plans.finishing(plan, group(live), held, plan.generation)
    assert (rest.step, rest.cursor, rest.global_batch) == (8, 100, 24)
    assert (rest.finishes, rest.divisor, rest.commands) == (plan.generation, plan.divisor, ("id",))
    assert {work.rank: work.ranges for work in rest.work} == left


def test_a_lost_step_is_made_again_of_its_own_samples_after_the_global_batch_was_changed() -> None:
    """24 samples, dealt by the shares of a global batch of 48: 12 / 8 / 4."""
    lost = plans.PlanMaker("run", group({0: 10, 1: 8, 2: 6}), config(batch=24), 8, 100, ("id",)).train()
    again = plans.again(lost, group({0: 24, 1: 16, 2: 8}))
    assert (again.step, again.cursor, again.global_batch, again.divisor) == (8, 100, 24, lost.divisor)
    assert {work.rank: work.ranges for work in again.work} == {
        0: (Range(100, 12),),
        1: (Range(112, 8),),
        2: (Range(120, 4),),
    }
