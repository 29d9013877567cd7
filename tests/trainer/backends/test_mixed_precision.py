"""A torch and an MLX rank draw one rank's curve at the tolerance of each data type that docs/training.md states."""

import pytest
from tests.trainer.support.curves import TOLERANCES, UNEVEN, group_losses, losses, worst


@pytest.mark.parametrize(
    "dtype", [pytest.param(name, marks=[] if name == "bfloat16" else [pytest.mark.tier("all")]) for name in TOLERANCES]
)
def test_mixed_ranks_keep_to_the_tolerance(new_rig, new_ranks, dtype):
    alone = losses(new_rig("torch", model__dtype=dtype), False, len(UNEVEN))
    apart = worst(group_losses(new_ranks("ring", ("torch", "mlx"), model__dtype=dtype), UNEVEN), alone)
    print(f"{dtype}: {apart:.2g}")
    assert alone[-1] < 0.9 * alone[0], "it has to learn for this to mean anything"
    assert 0 < apart < TOLERANCES[dtype]
