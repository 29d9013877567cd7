"""The probe's forward passes on MLX: every product in float32, and what each layer gives.

MLX promotes: embeddings in float32 make all that follows float32, from the weights as the run holds them. Layers get
another class for a while, as modules have no hooks.
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn

from trainctl.trainer.backends.base import Array, layer_values

_layers: Any = nn  # whose stubs lack some of them
_LINEAR = (_layers.Linear, _layers.QuantizedLinear)
_EMBEDDING = (_layers.Embedding, _layers.QuantizedEmbedding)


@contextmanager
def probing(model: Any, flips: int) -> Iterator[list[Array]]:
    """Have `model` compute in float32, `flips` applied to the integer view of each linear layer's input. The list gets
    each decoder layer's values, [B, L]."""
    layers: list[Array] = []
    changed: list[tuple[Any, type]] = []
    try:
        for module in model.modules():
            kind: Any = module.__class__
            if isinstance(module, _LINEAR):
                new = _linear(kind, flips)
            elif isinstance(module, _EMBEDDING):
                new = _embedding(kind, flips)
            elif any(module is layer for layer in getattr(model, "layers", [])):
                new = _watched(kind, layers)
            else:
                continue
            changed.append((module, kind))
            module.__class__ = new
        yield layers
    finally:
        for module, kind in reversed(changed):
            module.__class__ = kind


def _flipped(x: Any, flips: int) -> Any:
    x = x.astype(mx.float32)
    return mx.view(mx.view(x, mx.uint32) ^ flips, mx.float32) if flips else x


@functools.cache
def _linear(kind: Any, flips: int) -> Any:
    class Probed(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            return super().__call__(_flipped(x, flips))

    return Probed


@functools.cache
def _embedding(kind: Any, flips: int) -> Any:
    class Probed(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            scale = getattr(self, "embedding_scale", None)
            rows = super().__call__(x) if scale is None else self.rows(x).astype(mx.float32) * scale
            return _flipped(rows, flips)

        def as_linear(self, x: Any) -> Any:
            return super().as_linear(_flipped(x, flips))

    return Probed


def _watched(kind: Any, layers: list[Array]) -> Any:
    class Probed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            layers.append(layer_values(np.array(hidden.astype(mx.float32))))
            return output

    return Probed
