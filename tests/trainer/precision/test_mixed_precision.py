"""A torch and an MLX rank draw one rank's curve at the tolerance of each data type that docs/training.md states."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.curves import losses, worst
from tests.trainer.support.mixed_losses import STEPS, TOLERANCES, mixed_losses
from tests.trainer.support.ranks import Ranks


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
