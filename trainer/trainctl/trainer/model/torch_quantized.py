"""Layers of quantized weights on torch, in MLX's format: unpacked when they are used, and again in backward.

A word of 32 bits holds 32 / bits values, the first in its lowest bits. With q the values of a group, what `unpack`
makes equals `mx.dequantize` in float32 bit for bit:

    affine    scale * q + bias, each rounded
    mxfp4     E2M1(q) * 2^(scale - 127)
    nvfp4     E2M1(q) * E4M3(scale)

E2M1 and E4M3 are the floating-point types of the OCP Microscaling Formats (MX) specification 1.0.
"""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from trainctl.protocol.config.quantization import UNPACKED_VALUES, Quantization, layer_parts, quantization_of

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_E4M3 = tuple(torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().tolist())
"""By byte. It is looked up because Apple's GPUs lack torch's type."""
_BLOCK_VALUES = {"cpu": 1 << 18}
"""Values that are unpacked at once, by the kind of device: on a CPU, those that its caches hold."""
_MOST_BLOCK_VALUES = 1 << 24
"""Values that are unpacked at once on other devices, where each block costs a few launches."""


@dataclass(frozen=True)
class Packed:
    """A weight as it is stored."""

    how: Quantization
    words: torch.Tensor  # [..., in * bits / 32], int32
    scales: torch.Tensor  # [..., in / group_size]: float32 if affine, else uint8
    biases: torch.Tensor | None  # affine: as the scales

    @property
    def width(self) -> int:
        """Values of a row."""
        return self.words.shape[-1] * 32 // self.how.bits

    def rows(self, chosen: Any) -> "Packed":
        """Return some of its rows."""
        biases = None if self.biases is None else self.biases[chosen]
        return Packed(self.how, self.words[chosen], self.scales[chosen], biases)


def packed(how: Quantization, parts: Mapping[str, torch.Tensor]) -> Packed:
    """Return a weight of a layer's tensors as a file has them."""
    biases = parts.get("biases")
    scales = parts["scales"] if biases is None else parts["scales"].float()
    return Packed(how, parts["weight"].view(torch.int32), scales, None if biases is None else biases.float())


def unpack(weight: Packed, dtype: torch.dtype) -> torch.Tensor:
    """Return [..., in] in `dtype`."""
    leading = weight.words.shape[:-1]
    biases = None if weight.biases is None else weight.biases.flatten(0, -2)
    flat = Packed(weight.how, weight.words.flatten(0, -2), weight.scales.flatten(0, -2), biases)
    out = torch.empty((len(flat.words), weight.width), dtype=dtype, device=weight.words.device)
    for rows in _blocks(flat, _BLOCK_VALUES.get(out.device.type, _MOST_BLOCK_VALUES)):
        out[rows] = _unpacked(flat.rows(rows))
    return out.view(*leading, weight.width)


def _blocks(weight: Packed, values: int) -> Iterator[slice]:
    """Return its rows in parts of at most so many values."""
    step = max(1, values // weight.width)
    return (slice(start, start + step) for start in range(0, len(weight.words), step))


def _unpacked(weight: Packed) -> torch.Tensor:
    """Return [rows, in] in float32."""
    values = _values(weight).view(*weight.scales.shape, weight.how.group_size)
    if weight.biases is not None:
        values.mul_(weight.scales[..., None]).add_(weight.biases[..., None])
    else:
        values.mul_(_scales(weight.how.mode, weight.scales)[..., None])
    return values.view(len(weight.words), weight.width)


def _values(weight: Packed) -> torch.Tensor:
    """Return [rows, in] in float32: q or E2M1(q). The bytes of a word are in ascending order, as on all machines that
    torch supports."""
    stored = weight.words.view(torch.uint8)
    if weight.biases is None:
        pairs = torch.tensor([(low, high) for high in _E2M1 for low in _E2M1], device=stored.device)
        return torch.nn.functional.embedding(stored.int(), pairs)
    if weight.how.bits == 8:
        return stored.float()
    values = torch.empty((*stored.shape, 2), device=stored.device)
    values[..., 0] = stored & 15
    values[..., 1] = stored >> 4
    return values


def _scales(mode: str, stored: torch.Tensor) -> torch.Tensor:
    if mode == "nvfp4":
        return torch.tensor(_E4M3, device=stored.device)[stored.int()]
    return torch.exp2(stored.float() - 127)


class _Linear(torch.autograd.Function):
    """x W^T with a frozen W that is unpacked for it, and once more for the gradient of x; a large one in parts."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Packed) -> torch.Tensor:
        ctx.weight = weight
        blocks = [*_blocks(weight, UNPACKED_VALUES)]
        if len(blocks) == 1:
            return torch.nn.functional.linear(x, unpack(weight, x.dtype))
        product = x.new_empty((*x.shape[:-1], len(weight.words)))
        for rows in blocks:
            product[..., rows] = torch.nn.functional.linear(x, unpack(weight.rows(rows), x.dtype))
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), weight = gradients, ctx.weight
        blocks = _blocks(weight, UNPACKED_VALUES)
        parts = (gradient[..., rows] @ unpack(weight.rows(rows), gradient.dtype) for rows in blocks)
        return functools.reduce(torch.Tensor.add_, parts), None


class QuantizedLinear(torch.nn.Linear):
    """A linear layer whose weight is packed; its bias, if any, is whole. `weight` holds the words."""

    def __init__(self, weight: Packed, bias: torch.nn.Parameter | None) -> None:
        torch.nn.Module.__init__(self)
        self.in_features, self.out_features = weight.width, len(weight.words)
        _hold(self, weight)
        self.register_parameter("bias", bias)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        product: torch.Tensor = _Linear.apply(input, held(self))  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class QuantizedEmbedding(torch.nn.Embedding):
    """Embeddings whose rows are unpacked as they are looked up. `scale`: what the library's layer multiplies by."""

    def __init__(self, weight: Packed, dtype: torch.dtype, scale: torch.Tensor | None) -> None:
        torch.nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = len(weight.words), weight.width
        self.padding_idx, self._dtype = None, dtype
        _hold(self, weight)
        self.register_buffer("scale", scale, persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        rows, scale = unpack(held(self).rows(input), self._dtype), self.scale
        return rows * scale.to(rows.dtype) if isinstance(scale, torch.Tensor) else rows


def whole(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model with its packed layers as whole ones in float32; a head that is tied to the embeddings stays
    tied."""
    weights: dict[int, torch.nn.Parameter] = {}
    for name, layer in [*model.named_modules()]:
        if not isinstance(layer, QuantizedLinear | QuantizedEmbedding):
            continue
        words = held(layer).words.data_ptr()
        if words not in weights:
            weights[words] = torch.nn.Parameter(unpack(held(layer), torch.float32))
        if isinstance(layer, QuantizedLinear):
            linear = torch.nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
            linear.weight, linear.bias = weights[words], layer.bias
            model.set_submodule(name, linear)
        else:
            scale: Any = layer.scale
            model.set_submodule(name, _WholeEmbedding(weights[words], scale))
    return model


class _WholeEmbedding(torch.nn.Embedding):
    """A QuantizedEmbedding that is unpacked."""

    def __init__(self, weight: torch.nn.Parameter, scale: torch.Tensor | None) -> None:
        rows, width = weight.shape
        super().__init__(rows, width, device="meta")
        self.weight, self._scale = weight, scale

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  torch's name
        rows = super().forward(input)
        return rows if self._scale is None else rows * self._scale.to(rows.dtype)


def held(layer: torch.nn.Module) -> Packed:
    """Return a quantized layer's weight."""
    packed: Any = layer
    return Packed(packed.quantization, packed.weight, packed.scales, packed.biases)


def _hold(layer: Any, weight: Packed) -> None:
    layer.quantization = weight.how
    layer.weight = torch.nn.Parameter(weight.words, requires_grad=False)
    layer.register_buffer("scales", weight.scales, persistent=False)
    layer.register_buffer("biases", weight.biases, persistent=False)


def put_in(
    model: torch.nn.Module, stored: dict[str, torch.Tensor], config: Mapping[str, Any], dtype: torch.dtype
) -> None:
    """Replace the layers of `model` that `stored` has packed, whose parts are taken out of it, and tie its head to the
    embeddings if `config` wants it and the head isn't stored. Raises KeyError for a layer that the model doesn't
    have."""
    for layer in [name.removesuffix(".scales") for name in stored if name.endswith(".scales")]:
        how = quantization_of(config, layer)
        assert how is not None
        weight = packed(how, {part: stored.pop(name) for part, name in layer_parts(layer, stored).items()})
        try:
            old: Any = model.get_submodule(layer)
        except AttributeError:
            raise KeyError(f"the model has no layer {layer!r}") from None
        if isinstance(old, torch.nn.Embedding):
            model.set_submodule(layer, QuantizedEmbedding(weight, dtype, getattr(old, "embed_scale", None)))
        else:
            model.set_submodule(layer, QuantizedLinear(weight, old.bias))
    embeddings: Any = model.get_input_embeddings()  # type: ignore[operator]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    is_tied = config.get("tie_word_embeddings", getattr(model.config, "tie_word_embeddings", False))
    if is_tied and isinstance(embeddings, QuantizedEmbedding) and head.weight.is_meta:
        model.set_output_embeddings(QuantizedLinear(held(embeddings), head.bias))  # type: ignore[operator]
