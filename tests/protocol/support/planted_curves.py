"""Curves with a planted fault, made from a seed: a run's losses and gradient norms by step."""

import random
from pathlib import Path
from typing import Final

import numpy as np

Curve = list[tuple[float, float]]
"""(loss, gradient norm) of each step, from step 1 on."""
FAULT_STEP = 300
"""The first step of every planted fault."""
STEPS = 700


def healthy(seed: int, steps: int = STEPS) -> Curve:
    """A loss that falls and levels off, with scatter that is independent from step to step."""
    draw = random.Random(seed)
    start, end, half_life = draw.uniform(2, 11), draw.uniform(0.3, 1.8), draw.uniform(20, 60)
    scatter, norm = draw.uniform(0.01, 0.06), draw.uniform(0.2, 3.0)
    curve = []
    for step in range(1, steps + 1):
        part = 0.5 ** (step / half_life)
        loss = (end + (start - end) * part) * (1 + draw.gauss(0, scatter))
        curve.append((loss, norm * (1 + 2 * part) * draw.lognormvariate(0, 0.15)))
    return curve


def spiked(seed: int, back_after: int | None) -> Curve:
    """The loss and the norm jump to a multiple, and fall back exponentially within about `back_after` steps; None: they
    stay there."""
    draw, curve = random.Random(seed + 10_000), healthy(seed)
    height, norms = draw.uniform(1.0, 3.0), draw.uniform(5.0, 40.0)
    for index in range(FAULT_STEP - 1, len(curve)):
        left = 1.0 if back_after is None else 0.5 ** (6 * (index - FAULT_STEP + 1) / back_after)
        loss, norm = curve[index]
        curve[index] = loss * (1 + height * left), norm * (1 + norms * left)
    return curve


def diverged(seed: int) -> Curve:
    """The loss rises slowly, by one to three times itself within 300 steps, the norm hardly."""
    draw, curve = random.Random(seed + 20_000), healthy(seed)
    rise = draw.uniform(1.0, 3.0) / 300
    for index in range(FAULT_STEP - 1, len(curve)):
        loss, norm = curve[index]
        curve[index] = loss * (1 + rise * (index - FAULT_STEP + 1)), norm * 1.2
    return curve


def evaluations(seed: int, *, plateau_from: int | None) -> list[tuple[int, float]]:
    """A held-out loss every 50 steps that improves by 0.2 % to 2 % each time; from an evaluation on it stays, or gets
    worse."""
    draw = random.Random(seed + 30_000)
    loss, found = draw.uniform(2, 6), []
    for number in range(1, 41):
        stays = plateau_from is not None and number >= plateau_from
        loss *= 1 + draw.uniform(0, 0.002) if stays else 1 - draw.uniform(0.002, 0.02)
        found.append((50 * number, loss))
    return found


CURVES: Final = np.load(Path(__file__).resolve().parents[2] / "golden" / "curves.npy").astype(float)
"""(curve, step, loss and gradient norm)."""
