"""The probe's forward passes on torch: every product in float32, and what each layer gives.

In 16 bits, rounding alone moves a real model's log-probabilities by up to 1 nat, which hides a model that differs. So
products are computed in float32 from the weights as the run holds them, one block of rows at a time; no second copy of
the model is made.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainctl.protocol.config.quantization import UNPACKED_VALUES
from trainctl.trainer.backends.base import Array, layer_values

_LOW = (torch.bfloat16, torch.float16)


class Float32Products(TorchFunctionMode):
    """Keeps all that follows from the embeddings in float32. `flips` is applied to the integer view of each linear
    layer's input."""

    def __init__(self, flips: int) -> None:
        super().__init__()
        self._flips = flips

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return self._linear(*args, **kwargs)
        if func in (torch.Tensor.to, torch.Tensor.type_as) and _lowers(args, kwargs):
            return args[0]
        if not func.__name__.endswith("_") and _are_mixed([*args, *kwargs.values()]):  # else it writes to its first
            return func(*map(_float, args), **{name: _float(value) for name, value in kwargs.items()})
        return func(*args, **kwargs)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
        rows = max(1, UNPACKED_VALUES // weight.shape[-1])
        blocks = (weight,) if weight.dtype == torch.float32 else torch.split(weight, rows)
        x = self.flipped(input)
        parts = [torch.nn.functional.linear(x, block.float()) for block in blocks]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return product if bias is None else product + bias.float()

    def flipped(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` in float32, moved by the flips."""
        x = x.float()
        return (x.contiguous().view(torch.int32) ^ self._flips).view(torch.float32) if self._flips else x


@contextmanager
def probing(model: Any, flips: int) -> Iterator[list[Array]]:
    """Have `model` compute in float32. The list gets each decoder layer's values, [B, L]."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder: Any = model.get_decoder() if hasattr(model, "get_decoder") else model
    layers: list[Array] = []
    mode = Float32Products(flips)

    def embed(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return mode.flipped(output)

    def watch(module: object, inputs: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        layers.append(layer_values(hidden.float().cpu().numpy()))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                hooks.callback(module.register_forward_hook(embed).remove)
        for module in decoder.modules():
            if isinstance(module, GradientCheckpointingLayer):
                hooks.callback(module.register_forward_hook(watch).remove)
        with mode:
            yield layers


def _lowers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a conversion of a float32 tensor is to 16 bits."""
    wanted = (*args[1:], *kwargs.values())
    types = [each.dtype if isinstance(each, torch.Tensor) else each for each in wanted]
    return args[0].dtype == torch.float32 and any(each in _LOW for each in types if isinstance(each, torch.dtype))


def _are_mixed(values: Sequence[Any]) -> bool:
    """Return whether there are tensors of float32 and of 16 bits among the values, and in lists among them."""
    flat = [part for each in values for part in (each if isinstance(each, list | tuple) else (each,))]
    types = {part.dtype for part in flat if isinstance(part, torch.Tensor)}
    return torch.float32 in types and not types.isdisjoint(_LOW)


def _float(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_float, value))
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _LOW else value
