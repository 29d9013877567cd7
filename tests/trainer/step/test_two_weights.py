"""A loss of two terms with a divisor each: the same gradient, loss and metric however the batch is cut."""

from collections.abc import Callable
from typing import Any

from trainctl.protocol.config.objectives import Objective as Row
from trainctl.protocol.config.objectives import ObjectiveMetric
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Objective, Outputs, Sums

STEPS = 8


class TokensAndSamples(Objective):
    """Cross-entropy per token, and the square of each sample's loss per sample."""

    def __init__(self) -> None:
        super().__init__("sft")
        self.row = Row(
            ("tokens", "samples"), "nats per token", True, (ObjectiveMetric("square", "samples", "square", ""),)
        )

    def sums(self, outputs: Outputs) -> Sums:
        losses = outputs.token_losses()
        square = (0.1 * losses.sum(-1)).square().sum()
        return Sums({"tokens": losses.sum(), "samples": square}, {"square": square})

    def weights(self, batch: Batch) -> dict[str, float]:
        return {"tokens": batch.weight, "samples": float(len(batch))}


def with_it(backend: Backend) -> Backend:
    object.__setattr__(backend.parts, "objective", TokensAndSamples())
    return backend


def figures(rig: Any, micro: int) -> list[tuple[float, ...]]:
    reports = [rig.train(step, micro) for step in range(1, STEPS + 1)]
    return [(one.loss_sum / one.weight, one.values["square"], one.grad_norm) for one in reports]


def worst(one: list[tuple[float, ...]], other: list[tuple[float, ...]]) -> float:
    pairs = [pair for left, right in zip(one, other, strict=True) for pair in zip(left, right, strict=True)]
    return max(abs(left - right) / abs(right) for left, right in pairs)


def test_it_does_not_depend_on_the_cut_or_the_backend(new_rig: Callable[..., Any]) -> None:
    whole, cut, mlx = (
        figures(new_rig(backend, samples=True, wrap=with_it), micro)
        for backend, micro in (("torch", 12), ("torch", 5), ("mlx", 5))
    )
    assert worst(cut, whole) < 1e-5
    assert worst(mlx, whole) < 5e-5


def test_it_does_not_depend_on_the_ranks(new_rig: Callable[..., Any], new_ranks: Callable[..., Any]) -> None:
    alone = figures(new_rig("torch", samples=True, wrap=with_it), 12)
    ranks = new_ranks("gloo", ("torch", "torch"), samples=True, wrap=with_it)
    assert not ranks.form()
    together = []
    for step in range(1, STEPS + 1):
        one, other = ranks.train(ranks.plan(step, (5, 7) if step % 2 else (9, 3), (3, 3)))
        assert one.values["square"] == other.values["square"]
        together.append((one.loss_sum / one.weight, one.values["square"], one.grad_norm))
    assert worst(together, alone) < 1e-5


def test_one_weight_takes_no_look_at_the_step(new_rig: Callable[..., Any]) -> None:
    rig = new_rig("torch", samples=True, data__prefetch=0)
    sizes: list[int] = []
    batch = rig.dataset.batch

    def noted(indices: Any) -> Batch:
        sizes.append(len(indices))
        found: Batch = batch(indices)
        return found

    rig.dataset.batch = noted
    rig.train(1, 4)
    assert sizes == [4, 4, 4]
