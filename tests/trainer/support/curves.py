"""Curves of losses, and how far two of them are apart."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trainctl.trainer.data.permutation import samples_at

STEPS = 40
UNEVEN = [((7, 5), (4, 3))] * 8 + [((2, 10), (1, 10))] * 12
"""Shares and micro-batches of two ranks in 20 steps, with a rebalance and a resize."""
TOLERANCES = {"float32": 5e-6, "bfloat16": 5e-4, "float16": 1e-4}
"""The distance by which losses in 16 bit may be from those in 32 bit."""
G = 12
SIZES = (12, 1, 5, 7, 2, 12, 3, 11)


def losses(rig: Any, resized: bool, steps: int = STEPS) -> list[float]:
    """Return the losses of one rank; `resized` changes the micro-batch every third step."""
    reports = [rig.train(step, SIZES[(step // 3) % len(SIZES)] if resized else G) for step in range(1, steps + 1)]
    assert all(report.skipped is None for report in reports)
    return [report.loss_sum / report.weight for report in reports]


def group_losses(ranks: Any, deals: Sequence[tuple[Sequence[int], Sequence[int]]], **changes: Any) -> list[float]:
    """Form a group and return the losses of its steps, which all ranks must report alike; `deals` has each step's
    shares and micro-batches."""
    assert ranks.form() == []
    found = []
    for step, (shares, micros) in enumerate(deals, 1):
        reports = ranks.train(ranks.plan(step, shares, micros, **changes))
        assert not [report for report in reports if isinstance(report, Exception)], reports
        (loss,) = {report.loss_sum / report.weight for report in reports}
        found.append(loss)
    return found


def worst(one: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference."""
    return float(np.max(np.abs(np.array(one) / np.array(other) - 1)))


def plain_losses(rig: Any, model: Any, optimizer: Any, steps: int) -> list[float]:
    """Return the losses of a plain torch loop over the rig's batches, with none of our arithmetic: the mean loss over
    the batch, clip_grad_norm_ and the optimizer."""
    import torch

    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found = []
    for step in range(1, steps + 1):
        positions = np.arange((step - 1) * G, step * G)
        batch = rig.dataset.batch(samples_at(positions, rig.dataset.samples, rig.config.run.seed))
        logits = model(input_ids=torch.tensor(batch.inputs, dtype=torch.int64)).logits
        targets = torch.tensor(batch.targets, dtype=torch.int64)
        picked = -torch.log_softmax(logits, -1).gather(-1, targets[..., None])[..., 0]
        counted = torch.tensor(batch.counted)
        loss = (picked * counted).sum() / counted.sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, step / 5)
        optimizer.step()
        found.append(loss.item())
    return found
