"""AdamW of bfloat16 weights on CUDA, all parameters in one Triton kernel (`_update`).

It reads 16 bytes of a split weight and writes 12; with a pass for each operation, 88 bytes are moved. The formula is
that of torch.optim.AdamW (Loshchilov and Hutter 2019); results differ from its in the last place.

Triton is imported with this module, which therefore is imported only where it is used.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trainctl.trainer.precision.torch_weights import KernelParts

BLOCK_VALUES = 2048
"""Values of a parameter that a program of the kernel updates."""
_VECTOR_BYTES = 16
"""Addresses in bytes, and counts of values, must be multiples of this for loads of whole vectors. One parameter whose
aren't makes the kernel load single values of all."""


Tensors = Sequence[torch.Tensor]


class Hyperparameters(NamedTuple):
    """Of one update; `decay` acts on matrices only."""

    learning_rate: float
    beta1: float
    beta2: float
    epsilon: float
    decay: float


class TritonUpdate:
    """The update of parameters with these numbers of values on a device."""

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        counts = [-(-size // BLOCK_VALUES) for size in sizes]
        self._device, self._sizes, self._programs = device, [*sizes], sum(counts)
        owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(counts))
        blocks = torch.cat([torch.arange(count) for count in counts])
        self._places = torch.stack((owners, blocks), 1).to(torch.int32).to(device)

    @classmethod
    def compiled(cls, parts: Sequence[KernelParts]) -> "TritonUpdate":
        """Of these parameters, with the kernel compiled and run once. Raises what Triton raises if it can't."""
        device = parts[0].weights.device
        made = cls([each.weights.numel() for each in parts], device)
        is_aligned = _are_aligned([_row(each) for each in parts])
        zeros = [torch.zeros(BLOCK_VALUES if is_aligned else 1, device=device) for _ in range(4)]
        rests = None if parts[0].rests is None else zeros[0].to(torch.int16)
        small = KernelParts(zeros[0].to(torch.bfloat16), rests)
        values = Hyperparameters(1.0, 0.9, 0.999, 1e-8, 0.0)
        _, gradient, first, second = zeros
        cls([len(first)], device)([small], [gradient], [first], [second], 1.0, values, 1)
        torch.cuda.synchronize(device)
        return made

    def __call__(
        self, parts: Sequence[KernelParts], gradients: Tensors, first: Tensors, second: Tensors, factor: float,
        values: Hyperparameters, update: int,
    ) -> None:  # fmt: skip
        """Update contiguous parameters, and their float32 moments, by gradients times `factor`; `update` counts from 1.
        Raises ValueError for a tensor that isn't contiguous or on the device, or has another size or type."""
        rows = [_row(*each) for each in zip(parts, gradients, first, second, strict=True)]
        if [each.weights.numel() for each in parts] != self._sizes or parts[0].weights.device != self._device:
            raise ValueError("an update takes the parameters that it was made for")
        table = torch.tensor(rows, dtype=torch.int64).to(self._device, non_blocking=True)
        is_aligned = _are_aligned(rows)
        rate, beta1, beta2, epsilon, decay = values
        kernel: Any = _update
        with torch.cuda.device(self._device):
            kernel[(self._programs,)](
                table, self._places, factor, rate * decay, beta1, 1 - beta1, beta2, 1 - beta2, epsilon,
                rate / (1 - beta1**update), (1 - beta2**update) ** 0.5,
                is_split=parts[0].rests is not None, is_aligned=is_aligned, size=BLOCK_VALUES,
            )  # fmt: skip


def _are_aligned(rows: Sequence[Sequence[int]]) -> bool:
    """Whether whole vectors can be loaded, of all parameters."""
    return all(number % _VECTOR_BYTES == 0 for row in rows for number in row[:-3])


def _row(parts: KernelParts, *tensors: torch.Tensor) -> list[int]:
    """What the kernel reads of a parameter: addresses, the count of its values, whether it decays, and the key."""
    weights, rests, key = parts
    halves = [] if rests is None else [(rests, torch.int16)]
    for tensor, dtype in ((weights, torch.bfloat16), *halves, *((each, torch.float32) for each in tensors)):
        found, wanted = ((tensor.dtype, tensor.device, tensor.numel()), (dtype, weights.device, weights.numel()))
        if found != wanted or not tensor.is_contiguous():
            raise ValueError(f"an update takes contiguous tensors of {wanted}, not {found} of stride {tensor.stride()}")
    held = (weights, weights if rests is None else rests, *tensors)
    return [*(tensor.data_ptr() for tensor in held), weights.numel(), int(weights.ndim >= 2), *key]


@triton.jit  # type: ignore[untyped-decorator]
def _mix(x: tl.tensor) -> tl.tensor:
    """fmix of stochastic_rounding.py, on uint32."""
    x ^= x >> 16
    x *= 0x85EBCA6B
    x ^= x >> 13
    x *= 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def _update(
    table: tl.tensor, places: tl.tensor, factor: tl.tensor, decay_part: tl.tensor, beta1: tl.tensor, new1: tl.tensor,
    beta2: tl.tensor, new2: tl.tensor, epsilon: tl.tensor, step_size: tl.tensor, root_correction: tl.tensor,
    is_split: tl.constexpr, is_aligned: tl.constexpr, size: tl.constexpr,
) -> None:  # fmt: skip
    """One block of one parameter. `new1` and `new2` are 1 less the betas; `decay_part` of a matrix decays."""
    program = tl.program_id(0)
    row = table + tl.load(places + 2 * program).to(tl.int64) * 9
    block = tl.load(places + 2 * program + 1).to(tl.int64)
    weights = tl.load(row).to(tl.pointer_type(tl.int16))
    rests = tl.load(row + 1).to(tl.pointer_type(tl.int16))
    gradients = tl.load(row + 2).to(tl.pointer_type(tl.float32))
    firsts = tl.load(row + 3).to(tl.pointer_type(tl.float32))
    seconds = tl.load(row + 4).to(tl.pointer_type(tl.float32))
    count = tl.load(row + 5)
    if is_aligned:  # so that whole vectors are loaded; the compiler doesn't take such a hint through a function
        weights, rests = tl.multiple_of(weights, 16), tl.multiple_of(rests, 16)
        firsts, seconds = tl.multiple_of(firsts, 16), tl.multiple_of(seconds, 16)
        gradients, count = tl.multiple_of(gradients, 16), tl.multiple_of(count, 16)
    at = block * size + tl.arange(0, size)
    inside = at < count

    bits = tl.load(weights + at, mask=inside, other=0).to(tl.int32) << 16
    if is_split:
        bits += tl.load(rests + at, mask=inside, other=0).to(tl.int32)
    value = bits.to(tl.float32, bitcast=True)
    gradient = tl.load(gradients + at, mask=inside, other=0.0) * factor
    first = tl.load(firsts + at, mask=inside, other=0.0) * beta1 + gradient * new1
    second = tl.load(seconds + at, mask=inside, other=0.0) * beta2 + gradient * gradient * new2
    value -= tl.where(tl.load(row + 6) != 0, value * decay_part, 0.0)
    value -= step_size * tl.div_rn(first, tl.div_rn(tl.sqrt_rn(second), root_correction) + epsilon)

    tl.store(firsts + at, first, mask=inside)
    tl.store(seconds + at, second, mask=inside)
    bits = value.to(tl.int32, bitcast=True)
    if is_split:
        tl.store(rests + at, bits.to(tl.int16), mask=inside)
        bits = (bits + 0x8000) >> 16
    else:
        x = _mix(at.to(tl.uint32) ^ tl.load(row + 8).to(tl.uint32))
        x = _mix(x + tl.load(row + 7).to(tl.uint32)) >> 16
        bits = (bits + x.to(tl.int32)) >> 16
    tl.store(weights + at, bits.to(tl.int16), mask=inside)
