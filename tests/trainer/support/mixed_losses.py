"""Losses in 16 bit, and how far they may be from those in 32 bit."""

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
