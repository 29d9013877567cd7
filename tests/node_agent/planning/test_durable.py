"""Which checkpoints a run can go back to."""

import msgspec
from hypothesis import given
from hypothesis import strategies as st
from tests.node_agent.support.simulation import durable

from trainctl.trainer.checkpoints.files import spare

NEW = durable(("a",), 4)


def test_the_first_one_after_a_multiple_is_kept_for_sure() -> None:
    kept = msgspec.structs.replace(NEW, checkpoints=(600, 1100, 1350, 1600))
    assert kept.kept_for_sure(2, 1000) == (600, 1100, 1350, 1600)
    assert kept.kept_for_sure(2, 1000, planned=True) == (1100, 1600)
    assert kept.kept_for_sure(1, 0, planned=True) == ()


@given(steps=st.sets(st.integers(1, 99), min_size=1), keep_last=st.integers(1, 3), keep_every=st.integers(0, 30))
def test_what_is_kept_for_sure_outlives_the_next_one(steps: set[int], keep_last: int, keep_every: int) -> None:
    kept = msgspec.structs.replace(NEW, checkpoints=tuple(sorted(steps)))
    sure = kept.kept_for_sure(keep_last, keep_every, planned=True)
    assert list(sure) == sorted(sure)
    assert not {*sure} & {*spare([*steps, 100], keep_last, keep_every, [])}
