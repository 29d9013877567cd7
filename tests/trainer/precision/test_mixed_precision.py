"""A torch and an MLX rank draw one rank's curve at the tolerance of each data type that docs/training.md states."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.curves import losses, worst
from tests.trainer.support.ranks import Ranks

STEPS = 20
TOLERANCES = {"float32": 5e-6, "bfloat16": 5e-4, "bf16-sr": 1e-3, "float16": 1e-4}


def mixed_losses(ranks: Ranks) -> list[float]:
    """Of two ranks with uneven shares, a rebalance and a resize, which both report alike."""
    assert ranks.form() == []
    found = []
    for step in range(1, STEPS + 1):
        shares, micros = ((7, 5), (4, 3)) if step < 9 else ((2, 10), (1, 10))
        (loss,) = {report.loss_sum / report.weight for report in ranks.train(ranks.plan(step, shares, micros))}
        found.append(loss)
    return found


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_mixed_ranks_keep_to_the_tolerance(
    new_rig: Callable[..., Any], new_ranks: Callable[..., Ranks], dtype: str
) -> None:
    alone = losses(new_rig("torch", model__dtype=dtype), False, STEPS)
    apart = worst(mixed_losses(new_ranks("gloo", ("torch", "mlx"), model__dtype=dtype)), alone)
    print(f"{dtype}: {apart:.2g}")
    assert alone[-1] < 0.9 * alone[0], "it has to learn for this to mean anything"
    assert 0 < apart < TOLERANCES[dtype]


def test_stochastically_rounded_ranks_hold_the_same_bits(new_ranks: Callable[..., Ranks]) -> None:
    ranks = new_ranks("gloo", ("torch", "torch"), model__dtype="bf16-sr")
    assert len(mixed_losses(ranks)) == STEPS
    one, other = (rank.rig.backend.copy_of("weights") for rank in ranks.ranks)
    assert all(np.array_equal(array, other[name]) for name, array in one.items())
