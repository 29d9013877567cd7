"""Gradient checkpointing: decoder layers that keep only their input, and are computed again in the backward pass.

It trades time for memory (Chen et al. 2016) and changes no bit of a gradient. "alternate" applies to every other layer,
from the first. Each instance of a layer has its own setting.
"""

import functools
from typing import Any

from trainctl.protocol.config.run_tables import GradientCheckpointing
from trainctl.protocol.errors import InvalidInputError

_EVERY = {"alternate": 2, "all": 1}


def checkpoint_torch(model: Any, mode: GradientCheckpointing, where: str) -> None:
    """Set it on the layers of a transformers model. Raises InvalidInputError for a model that can't do it."""
    if mode == "none":
        return
    from torch.utils.checkpoint import checkpoint
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Any] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    _check(layers, mode, where)
    for layer in layers[:: _EVERY[mode]]:
        layer._gradient_checkpointing_func = functools.partial(checkpoint, use_reentrant=False)
        layer.gradient_checkpointing = True


def checkpoint_mlx(model: Any, mode: GradientCheckpointing, where: str) -> None:
    """Set it on the layers of an mlx-lm model. Raises InvalidInputError for a model that can't do it."""
    if mode == "none":
        return
    layers = getattr(model, "layers", [])
    _check(layers, mode, where)
    for layer in layers[:: _EVERY[mode]]:
        kind: Any = type(layer)
        layer.__class__ = _checkpointed(kind)


@functools.cache
def _checkpointed(kind: Any) -> Any:
    """A class of layers that have the names and parameters of `kind`."""
    import mlx.core as mx
    from mlx import nn

    def constant(argument: Any) -> Any:
        """mx.checkpoint differentiates all arrays that it is given, masks and positions too."""
        is_array = isinstance(argument, mx.array)
        return mx.stop_gradient(argument) if is_array and not mx.issubdtype(argument.dtype, mx.floating) else argument

    def compute(layer: Any, *args: Any, **kwargs: Any) -> Any:
        constants = {name: constant(value) for name, value in kwargs.items()}
        return kind.__call__(layer, *map(constant, args), **constants)

    class Checkpointed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if not self.training:
                return super().__call__(*args, **kwargs)
            return nn.utils.checkpoint(self, functools.partial(compute, self))(*args, **kwargs)

    return Checkpointed


def _check(layers: list[Any], mode: GradientCheckpointing, where: str) -> None:
    if not layers:
        raise InvalidInputError(
            f"{where}: model.gradient_checkpointing", f'this model has no layers to which {mode!r} applies; use "none"'
        )
