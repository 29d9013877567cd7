"""Trained weights on torch: what a model computes with, and the float32 values that the optimizer updates.

The optimizer takes float32 values of a piece of a parameter at a time, so a step needs little memory beside the state.
A piece is `start:stop` of the flat parameter.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from trainctl.trainer.precision.stochastic_rounding import FIRST_FACTOR, SECOND_FACTOR, key_of

_HALF = 0x8000
"""Half of a bfloat16's last place, in the bits of a float32."""
_BLOCK_VALUES, _BLOCK_VALUES_ON_CPU = 1 << 22, 1 << 16
"""Values rounded at a time: on a CPU as many as stay in its cache. A GPU needs more to be worth a launch."""


class KernelParts(NamedTuple):
    """What one kernel for all parameters reads and writes of a parameter's weights (triton_update.py)."""

    weights: torch.Tensor  # bfloat16
    rests: torch.Tensor | None  # int16, flat: of a split weight; None: it is rounded stochastically
    key: tuple[int, int] = (0, 0)  # the words of that rounding


class TorchWeights(ABC):
    """The trained parameters of a model, in the order of their names."""

    group_values = 1 << 62
    """Most values of a group."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        self.parameters = [*parameters]
        for p in self.parameters:
            p.data = p.data.contiguous()

    @property
    def masters(self) -> list[torch.nn.Parameter] | None:
        """Float32 parameters that can be updated as they are; None: they are made a piece at a time."""
        return None

    @property
    def kept_bytes(self) -> int:
        """Of what is kept beside the model's parameters."""
        return 0

    @abstractmethod
    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        """Float32 values, flat: the weights' own memory, or a copy."""

    @abstractmethod
    def store(self, index: int, start: int, values: torch.Tensor, update: int | None = None) -> None:
        """Take over the flat values of a piece: what became of it in an update; None: of a checkpoint or another
        rank."""

    def group(self, indices: range) -> torch.Tensor | None:
        """Float32 values of whole parameters, one after another in a copy; None: each is taken by itself."""
        return None

    def store_group(self, indices: range, values: torch.Tensor, update: int) -> None:  # noqa: B027
        """Take over what became of a group in an update; `values` are used up."""

    def kernel_parts(self, update: int) -> list[KernelParts] | None:
        """Of each parameter, for its update of this number; None: these weights have no such kernel."""
        return None

    def values(self, index: int) -> torch.Tensor:
        """Float32 values of a whole parameter."""
        parameter = self.parameters[index]
        return self.piece(index, 0, parameter.numel()).view(parameter.shape)

    def _computed(self, index: int, start: int, count: int) -> torch.Tensor:
        """What the model computes with, flat."""
        return self.parameters[index].detach().view(-1)[start : start + count]

    def _upper_bits(self, indices: range) -> list[torch.Tensor]:
        """Those of each parameter, flat: a bfloat16's bits."""
        return [self.parameters[index].detach().view(-1).view(torch.int16) for index in indices]

    def publish(self) -> None:  # noqa: B027
        """Masters have been updated as they are: make the model compute with them."""


class OwnWeights(TorchWeights):
    """Float32 parameters, or those of a model that isn't trained."""

    @property
    def masters(self) -> list[torch.nn.Parameter]:
        return self.parameters

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        return self._computed(index, start, stop - start)

    def store(self, index: int, start: int, values: torch.Tensor, update: int | None = None) -> None:
        here = self._computed(index, start, values.numel())
        if here.data_ptr() != values.data_ptr():
            here.copy_(values)


class CopiedWeights(TorchWeights):
    """Parameters in 16 bits beside float32 masters of all of them."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], dtype: torch.dtype) -> None:
        self._masters = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
        for p in parameters:
            p.data = p.data.to(dtype)
        super().__init__(parameters)

    @property
    def masters(self) -> list[torch.nn.Parameter]:
        return self._masters

    @property
    def kept_bytes(self) -> int:
        return sum(p.nbytes for p in self._masters)

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        return self._masters[index].detach().view(-1)[start:stop]

    def store(self, index: int, start: int, values: torch.Tensor, update: int | None = None) -> None:
        master = self.piece(index, start, start + values.numel())
        if master.data_ptr() != values.data_ptr():
            master.copy_(values)
        self._computed(index, start, values.numel()).copy_(values)

    @torch.no_grad()
    def publish(self) -> None:
        torch._foreach_copy_([*self.parameters], [*self._masters])


class SplitWeights(TorchWeights):
    """Bfloat16 parameters, and the 16 bits that make float32 masters of them: 4 bytes in all where a master beside its
    copy takes 6. The bits of a master are `(bfloat16 << 16) + rest`, `rest` signed; a bfloat16 is the nearest to its
    master, and of two as near the one farther from zero."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """`parameters` are float32, and become bfloat16."""
        self._ends = [0, *itertools.accumulate(p.numel() for p in parameters)]
        self._rests = torch.empty(self._ends[-1], dtype=torch.int16, device=parameters[0].device)
        for p, begin, end in zip(parameters, self._ends, self._ends[1:], strict=False):
            bits = p.detach().contiguous().view(torch.int32)
            self._rests[begin:end].copy_(bits.view(-1))
            p.data = ((bits + _HALF) >> 16).to(torch.int16).view(torch.bfloat16)
        super().__init__(parameters)

    @property
    def kept_bytes(self) -> int:
        return self._rests.nbytes

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        bits = self._computed(index, start, stop - start).view(torch.int16).to(torch.int32)
        bits <<= 16
        bits += self._rest(index, start, stop - start)
        return bits.view(torch.float32)

    def store(self, index: int, start: int, values: torch.Tensor, update: int | None = None) -> None:
        bits, count = values.view(torch.int32), values.numel()
        self._rest(index, start, count).copy_(bits)
        self._computed(index, start, count).view(torch.int16).copy_((bits + _HALF) >> 16)

    def group(self, indices: range) -> torch.Tensor:
        begin, end = self._ends[indices[0]], self._ends[indices[-1] + 1]
        bits = torch.empty(end - begin, dtype=torch.int32, device=self._rests.device)
        torch._foreach_copy_(self._parts(bits, indices), self._upper_bits(indices))
        bits <<= 16
        bits += self._rests[begin:end]
        return bits.view(torch.float32)

    def store_group(self, indices: range, values: torch.Tensor, update: int) -> None:
        bits = values.view(torch.int32)
        self._rests[self._ends[indices[0]] : self._ends[indices[-1] + 1]].copy_(bits)
        bits += _HALF
        bits >>= 16
        torch._foreach_copy_(self._upper_bits(indices), self._parts(bits, indices))

    def kernel_parts(self, update: int) -> list[KernelParts]:
        sizes = [p.numel() for p in self.parameters]
        rests = torch.split(self._rests, sizes)
        return [KernelParts(p.detach(), rest) for p, rest in zip(self.parameters, rests, strict=True)]

    def _parts(self, bits: torch.Tensor, indices: range) -> list[torch.Tensor]:
        return [*torch.split(bits, [self.parameters[index].numel() for index in indices])]

    def _rest(self, index: int, start: int, count: int) -> torch.Tensor:
        begin = self._ends[index] + start
        return self._rests[begin : begin + count]


class RoundedWeights(TorchWeights):
    """Bfloat16 parameters alone: updates are rounded to them stochastically."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], seed: int) -> None:
        """`parameters` become bfloat16."""
        for p in parameters:
            p.data = p.data.to(torch.bfloat16)
        super().__init__(parameters)
        self._seed, self._rounding = seed, Rounding(parameters[0].device)
        self.group_values = self._rounding.block

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        return self._computed(index, start, stop - start).float()

    def store(self, index: int, start: int, values: torch.Tensor, update: int | None = None) -> None:
        here = self._computed(index, start, values.numel())
        if update is None:
            here.copy_(values)
            return
        bits, key = here.view(torch.int16), key_of(self._seed, update, index)
        for begin in range(0, values.numel(), self._rounding.block):
            part = slice(begin, begin + self._rounding.block)
            bits[part].copy_(self._rounding.of(values[part], key, start + begin))

    def group(self, indices: range) -> torch.Tensor:
        parts = [self.parameters[index].detach().view(-1) for index in indices]
        values = torch.empty(sum(part.numel() for part in parts), device=parts[0].device)
        torch._foreach_copy_([*torch.split(values, [part.numel() for part in parts])], parts)
        return values

    def store_group(self, indices: range, values: torch.Tensor, update: int) -> None:
        keys = [key_of(self._seed, update, index) for index in indices]
        sizes = [self.parameters[index].numel() for index in indices]
        rounded = self._rounding.of_several(values, keys, sizes)
        torch._foreach_copy_(self._upper_bits(indices), [*torch.split(rounded, sizes)])

    def kernel_parts(self, update: int) -> list[KernelParts]:
        keys = (key_of(self._seed, update, index) for index in range(len(self.parameters)))
        return [KernelParts(p.detach(), None, key) for p, key in zip(self.parameters, keys, strict=True)]


class Rounding:
    """Stochastic rounding on one device, at most `block` values at a time, in memory that is allocated once. Results
    are the bits of bfloat16 values as int32, of which the lower 16 count, as of `stochastic_rounding.rounded`; they
    last until the next call. torch lacks unsigned shifts, so upper bits are masked out."""

    def __init__(self, device: torch.device) -> None:
        self.block = _BLOCK_VALUES_ON_CPU if device.type == "cpu" else _BLOCK_VALUES
        self._count = torch.arange(self.block, dtype=torch.int32, device=device)
        self._x, self._shifted = torch.empty_like(self._count), torch.empty_like(self._count)

    def of(self, values: torch.Tensor, key: tuple[int, int], first: int) -> torch.Tensor:
        """Of the elements of a parameter from `first` on."""
        (high, low), count = key, values.numel()
        x = torch.add(self._count[:count], _signed(first & 0xFFFFFFFF), out=self._x[:count])
        return self._rounded(values, x, _signed(high), _signed(low))

    def of_several(
        self, values: torch.Tensor, keys: Sequence[tuple[int, int]], sizes: Sequence[int]
    ) -> torch.Tensor:  # fmt: skip
        """Of whole parameters, one after another."""
        device, count = values.device, values.numel()
        words = torch.tensor([[_signed(word) for word in key] for key in keys], dtype=torch.int32)
        each = torch.tensor([*sizes], device=device)
        high, low = (column.to(device).repeat_interleave(each, output_size=count) for column in words.unbind(1))
        x = self._x[:count]
        torch._foreach_copy_([*torch.split(x, [*sizes])], [self._count[:size] for size in sizes])
        return self._rounded(values, x, high, low)

    def _rounded(self, values: torch.Tensor, x: torch.Tensor, high: Any, low: Any) -> torch.Tensor:
        """`x` counts the elements."""
        x ^= low
        self._mix(x)
        x += high
        self._mix(x)
        x >>= 16
        x &= 0xFFFF
        x += values.view(torch.int32)
        x >>= 16
        return x

    def _mix(self, x: torch.Tensor) -> None:
        """The specification's fmix, in place."""
        self._xor_shifted(x, 16)
        x *= _signed(FIRST_FACTOR)
        self._xor_shifted(x, 13)
        x *= _signed(SECOND_FACTOR)
        self._xor_shifted(x, 16)

    def _xor_shifted(self, x: torch.Tensor, places: int) -> None:
        shifted = torch.bitwise_right_shift(x, places, out=self._shifted[: x.numel()])
        shifted &= (1 << (32 - places)) - 1
        x ^= shifted


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
