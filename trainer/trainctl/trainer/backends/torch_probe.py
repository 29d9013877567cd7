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

_PRODUCTS = tuple(
    function
    for function in (
        torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.bmm, torch.Tensor.bmm, torch.addmm,
        torch.baddbmm, torch.nn.functional.layer_norm, torch.nn.functional.rms_norm,
        getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None),
    )
    if function is not None
)  # fmt: skip
"""Functions whose arguments must be of one type. Others promote to float32 by themselves."""


class Float32Products(TorchFunctionMode):
    """Computes matrix products in float32. `flips` is applied to the integer view of each linear layer's input."""

    def __init__(self, flips: int) -> None:
        super().__init__()
        self._flips = flips

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return self._linear(*args, **kwargs)
        if func in _PRODUCTS:
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
def probing(model: torch.nn.Module, flips: int, tokens: Sequence[int]) -> Iterator[list[Array]]:
    """Have `model` compute in float32. The list gets each decoder layer's values, [B, L], for `tokens` = (B, L)."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers: list[Array] = []
    mode = Float32Products(flips)

    def embed(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return mode.flipped(output)

    def watch(module: object, inputs: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if tuple(hidden.shape[:2]) == tuple(tokens):  # an encoder's layers have other tokens
            layers.append(layer_values(hidden.float().cpu().numpy()))

    with ExitStack() as hooks:
        for module in model.modules():
            if isinstance(module, torch.nn.Embedding):
                hooks.callback(module.register_forward_hook(embed).remove)
            elif isinstance(module, GradientCheckpointingLayer):
                hooks.callback(module.register_forward_hook(watch).remove)
        with mode:
            yield layers


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
