"""The interface of objectives: from a model's outputs on one batch to named sums and named weights.

A new objective goes into two files. Its name, weights, metrics and settings: `OBJECTIVES` and `ObjectiveName` in
protocol/config/objectives.py. Its formula: a class in losses.py, chosen in `objective_for`.

Only sums, never means: those of all micro-batches on all ranks add up to the same loss and metrics however the batch
is cut. A loss may have several terms, each divided by a weight of its own.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.objectives import OBJECTIVES, ObjectiveName
from trainctl.trainer.data.batch import Batch

_VOCABULARY_FLOATS: Final = 1 << 24
"""Most logits of one piece of `Outputs.vocabulary`: 64 MiB."""


@dataclass
class Outputs(ABC):
    """The outputs of a model for one batch, each computed when it is read. Arrays are the backend's: torch.Tensor or
    mlx.core.array, float32 unless said. Ask for the logits before the losses, which are then made from them. The sum of
    the losses alone may be computed without ever holding all logits."""

    passes: Any  # of the model: see backends/passes.py
    batch: Batch
    computed_logits: Any = None

    @property
    def logits(self) -> Any:
        """Logits, [B, T, V]."""
        if self.computed_logits is None:
            self.computed_logits = self.passes.float32(self.passes.logits(self.batch))
        return self.computed_logits

    @property
    def counted(self) -> Any:
        """Flags [B, T], 1 where the target's loss counts, 0 elsewhere and in padding."""
        return self.passes.array(self.batch.counted)

    @abstractmethod
    def losses(self, *, every: bool = False, summed: bool = False) -> Any:
        """Return the cross-entropy of each target, [B, T] nats, or their sum; 0 where a target doesn't count, or, of
        `every` target, in padding alone."""

    def reference_losses(self) -> Any:
        """Return `losses` of the reference model: the one that adapters are trained beside. Without a gradient."""
        if self.batch.reference is not None:
            return -self.passes.array(self.batch.reference)
        assert self.passes.adapter is not None, "the model has no adapter, and the batch no reference log-probabilities"
        with self.passes.without_adapter():
            return self.passes.constant(self.passes.outputs(self.batch).losses())

    def vocabulary(self, *, with_reference: bool) -> "Iterator[Vocabulary]":
        """Yield all counted targets, some at a time, so that their logits are held only in part. Those of the reference
        need another forward pass."""
        passes, batch = self.passes, self.batch
        rows = np.flatnonzero(batch.counted)
        counted, targets = passes.array(rows), passes.array(batch.targets.ravel()[rows])
        own, head = passes.hidden(batch, counted)
        other = None
        if with_reference and passes.adapter is not None:
            with passes.without_adapter():
                other, _ = passes.hidden(batch, counted)
        size = max(1, _VOCABULARY_FLOATS // head(own[:1]).shape[-1])
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits, reference = passes.float32(head(own[part])), None
            if other is not None:
                with passes.without_adapter():
                    reference = passes.float32(head(other[part]))
            yield Vocabulary(logits, reference, targets[part])

    @abstractmethod
    def log_sigmoid(self, x: Any) -> Any:
        """Return log(1 / (1 + exp(-x))), element by element."""

    @abstractmethod
    def log_odds(self, x: Any) -> Any:
        """Return log(p / (1 - p)) of p = exp(x), element by element; x below 0."""


@dataclass(frozen=True)
class Vocabulary:
    """N targets with what the model says about every token."""

    logits: Any  # [N, V], float32
    reference: Any  # [N, V], of the reference model; None: not asked for, or the backend has none
    targets: Any  # [N], integers


@dataclass(frozen=True)
class Sums:
    """Over one batch or several: a loss in nats for each weight of the objective, and its metrics, by name. Numbers, or
    a backend's arrays of one element."""

    losses: Mapping[str, Any]
    metrics: Mapping[str, Any]
    rewards: Any = None  # [B], of each answer of the pairs; None: the objective has no pairs


class Objective(ABC):
    """The objective of a run. What it holds follows from the run file."""

    def __init__(self, name: ObjectiveName) -> None:
        self.name: ObjectiveName = name
        self.spec = OBJECTIVES[name]

    @abstractmethod
    def sums(self, outputs: Outputs) -> Sums:
        """Return the sums of one batch, differentiable, by the names in `spec`."""

    def held_out_sums(self, outputs: Outputs) -> dict[str, Any]:
        """Return the sums that only an evaluation has, by the names in `spec.held_out`. Sums that the model can't
        give are missing."""
        return {}

    def weights(self, batch: Batch) -> dict[str, float]:
        """Return what the batch adds to each weight."""
        return dict.fromkeys(self.spec.weights, batch.weight)

    def weights_of(self, lengths: NDArray[np.int64]) -> dict[str, float]:
        """Return what sequences with so many targets each add to each weight. An objective of several terms needs it
        for a step's batch before any part of that is assembled."""
        raise TypeError(f"{self.name}: an objective of several terms needs its own weights_of")

    def numbers(self, sums: Sums) -> list[Any]:
        """Return the losses and metrics of sums in an order that follows from `spec`."""
        losses = [sums.losses[weight] for weight in self.spec.weights]
        return losses + [sums.metrics[metric.name] for metric in self.spec.metrics]

    def named(self, numbers: NDArray[np.float64]) -> Sums:
        """Return the sums of several batches, whose `numbers` follow one another."""
        weights, metrics = self.spec.weights, [metric.name for metric in self.spec.metrics]
        totals = numbers.reshape(-1, len(weights) + len(metrics)).sum(axis=0).tolist()
        losses, values = totals[: len(weights)], totals[len(weights) :]
        return Sums(dict(zip(weights, losses, strict=True)), dict(zip(metrics, values, strict=True)))


def term_scales(scale: float, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the factor of each term of a loss before backward: `scale`, relative to the first term's weight."""
    first, *others = weights
    relative = {name: scale * weights[first] / weights[name] if weights[name] else 0.0 for name in others}
    return {first: scale, **relative}


def reported_loss_sum(losses: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the loss times the first weight, for losses and weights by the same names: each term is divided by its own
    weight. A term without weight is left out."""
    first, *others = losses
    return sum((losses[name] * weights[first] / weights[name] for name in others if weights[name]), losses[first])
