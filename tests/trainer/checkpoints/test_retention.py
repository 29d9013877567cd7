"""Which checkpoints stay."""

import pytest

from trainctl.trainer.checkpoints.retention import spare


@pytest.mark.parametrize(("keep_last", "keep_every", "kept", "left"), [
    (2, 0, [], [50, 60]), (1, 20, [], [20, 40, 60]), (1, 0, [30], [30, 60]), (2, 30, [10], [10, 30, 50, 60]),
    (9, 0, [], [10, 20, 30, 40, 50, 60]),
])  # fmt: skip
def test_the_last_those_of_every_and_the_best_stay(
    keep_last: int, keep_every: int, kept: list[int], left: list[int]
) -> None:
    steps = [10, 20, 30, 40, 50, 60]
    gone = spare(steps, keep_last, keep_every, kept)
    assert [step for step in steps if step not in gone] == left
