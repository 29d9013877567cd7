"""Which held-out pairs an evaluation reports: the first ones and the worst, however they were shared out."""

import math
import random

from trainctl.protocol.messages import PAIRS_FOLLOWED, WORST_PAIRS, EvaluatedPair, followed_pairs


def test_the_first_and_the_worst_are_kept_whoever_had_them() -> None:
    chance = random.Random(3)
    pairs = [EvaluatedPair(index, chance.gauss(0, 1), 0.0) for index in range(200)]
    pairs[150] = EvaluatedPair(150, math.nan, 0.0)
    whole = followed_pairs(pairs)
    worst = sorted(pairs, key=lambda pair: -math.inf if pair.index == 150 else pair.margin)[:WORST_PAIRS]
    assert {pair.index for pair in whole} == {*range(PAIRS_FOLLOWED), *(pair.index for pair in worst)}
    shares = [followed_pairs(pairs[start::3]) for start in range(3)]
    joined = followed_pairs([pair for share in shares for pair in share])
    assert [pair.index for pair in joined] == [pair.index for pair in whole]
