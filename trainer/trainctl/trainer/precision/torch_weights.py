"""Trained weights on torch: what a model computes with, and the float32 values that the optimizer updates.

The optimizer takes float32 values of a piece of a parameter at a time, so a step needs little memory beside the state.
A piece is `start:stop` of the flat parameter.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from trainctl.trainer.precision.stochastic_rounding import FIRST_FACTOR, SECOND_FACTOR, key_of

_HALF = 0x8000
"""Half of a bfloat16's last place, in the bits of a float32."""


class TorchWeights(ABC):
    """The trained parameters of a model, in the order of their names."""

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

    def store_group(self, indices: range, values: torch.Tensor) -> None:  # noqa: B027
        """Take over what became of a group in an update; `values` are used up."""

    def values(self, index: int) -> torch.Tensor:
        """Float32 values of a whole parameter."""
        parameter = self.parameters[index]
        return self.piece(index, 0, parameter.numel()).view(parameter.shape)

    def _computed(self, index: int, start: int, count: int) -> torch.Tensor:
        """What the model computes with, flat."""
        return self.parameters[index].detach().view(-1)[start : start + count]

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

    def store_group(self, indices: range, values: torch.Tensor) -> None:
        bits = values.view(torch.int32)
        self._rests[self._ends[indices[0]] : self._ends[indices[-1] + 1]].copy_(bits)
        bits += _HALF
        bits >>= 16
        torch._foreach_copy_(self._upper_bits(indices), self._parts(bits, indices))

    def _parts(self, bits: torch.Tensor, indices: range) -> list[torch.Tensor]:
        return [*torch.split(bits, [self.parameters[index].numel() for index in indices])]

    def _upper_bits(self, indices: range) -> list[torch.Tensor]:
        return [self.parameters[index].detach().view(-1).view(torch.int16) for index in indices]

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
        self._seed = seed

    def piece(self, index: int, start: int, stop: int) -> torch.Tensor:
        return self._computed(index, start, stop - start).float()

    def store(self, index: int, start: int, values: torch.Tensor, update: int | None = None) -> None:
        here = self._computed(index, start, values.numel())
        if update is None:
            here.copy_(values)
        else:
            rounded = round_stochastically(values, key_of(self._seed, update, index), start)
            here.view(torch.int16).copy_(rounded)


def round_stochastically(values: torch.Tensor, key: tuple[int, int], first: int) -> torch.Tensor:
    """The bits of bfloat16 values as int32, of which the lower 16 count: as `stochastic_rounding.rounded`. torch lacks
    unsigned shifts, so upper bits are masked out."""
    high, low = (_signed(word) for word in key)
    x = torch.arange(first, first + values.numel(), dtype=torch.int64, device=values.device).to(torch.int32)
    x ^= low
    x = _fmix(x)
    x += high
    x = _fmix(x)
    random = (x >> 16).bitwise_and_(0xFFFF)
    random += values.view(torch.int32)
    return random >> 16


def _fmix(x: torch.Tensor) -> torch.Tensor:
    """In place."""
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    x *= _signed(FIRST_FACTOR)
    x ^= (x >> 13).bitwise_and_(0x7FFFF)
    x *= _signed(SECOND_FACTOR)
    x ^= (x >> 16).bitwise_and_(0xFFFF)
    return x


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
