"""float16's loss scale, by what became of a step."""

import pytest

from trainctl.trainer.step.progress import LossScale


@pytest.mark.parametrize(("reason", "factor"), [("overflow", 0.5), ("nan", 0.5), ("empty", 1.0), (None, 1.0)])
def test_the_scale_is_halved_only_after_a_step_that_was_not_finite(reason: str | None, factor: float) -> None:
    scale = LossScale.of("float16")
    before = scale.value
    scale.committed("float16", reason)
    assert scale.value == factor * before


def test_the_scale_is_doubled_after_2000_finite_steps_in_a_row_with_empty_ones_between() -> None:
    scale = LossScale.of("float16")
    scale.committed("float16", "overflow")
    before = scale.value
    for _ in range(1999):
        scale.committed("float16", None)
        scale.committed("float16", "empty")
    assert scale.value == before
    scale.committed("float16", None)
    assert scale.value == 2 * before
