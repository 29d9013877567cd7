"""Trained weights on MLX: what a model computes with, and the float32 values that the optimizer updates.

As torch_weights.py has them, but for whole parameters, since MLX has no memory to write to in place.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from trainctl.trainer.precision.stochastic_rounding import FIRST_FACTOR, SECOND_FACTOR, key_of

Arrays = dict[str, Any]
_HALF = 0x8000
"""Half of a bfloat16's last place, in the bits of a float32."""
_BLOCK_VALUES = 1 << 16
"""Values rounded at a time on a CPU: as many as stay in its cache."""


class MlxWeights(ABC):
    """Trained parameters by their stored names. `computed` is what the model computes with, in the model's layout."""

    computed: Arrays

    @abstractmethod
    def values(self, name: str) -> Any:
        """In float32, or as they are held where nothing is trained."""

    @abstractmethod
    def store(self, name: str, values: Any, update: int | None = None) -> None:
        """Take over the values of a parameter: what became of it in an update; None: of a checkpoint or another
        rank."""

    @property
    def kept(self) -> Arrays:
        """Arrays beside those that the model computes with."""
        return {}

    @property
    def kept_bytes(self) -> int:
        """Of those."""
        return sum(array.nbytes for array in self.kept.values())


class MlxOwnWeights(MlxWeights):
    """Parameters that are updated as they are: float32, or those of a model that isn't trained."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.computed = dict(weights)

    def values(self, name: str) -> Any:
        return self.computed[name]

    def store(self, name: str, values: Any, update: int | None = None) -> None:
        self.computed[name] = values.astype(self.computed[name].dtype)


class MlxCopiedWeights(MlxWeights):
    """Parameters in 16 bits beside float32 masters."""

    def __init__(self, weights: Mapping[str, Any], dtype: Any) -> None:
        self._masters, self._dtype = dict(weights), dtype
        self.computed = {name: array.astype(dtype) for name, array in weights.items()}

    def values(self, name: str) -> Any:
        return self._masters[name]

    def store(self, name: str, values: Any, update: int | None = None) -> None:
        self._masters[name], self.computed[name] = values, values.astype(self._dtype)

    @property
    def kept(self) -> Arrays:
        return self._masters


class MlxSplitWeights(MlxWeights):
    """Bfloat16 parameters, and the 16 bits that make float32 masters of them, as on torch."""

    def __init__(self, weights: Mapping[str, Any]) -> None:
        self.computed, self._rests = {}, Arrays()
        for name, array in weights.items():
            self.store(name, array)

    def values(self, name: str) -> Any:
        bits = self.computed[name].view(mx.uint16).astype(mx.uint32) << 16
        rest = self._rests[name].view(mx.int16).astype(mx.int32).view(mx.uint32)
        return (bits + rest).view(mx.float32)

    def store(self, name: str, values: Any, update: int | None = None) -> None:
        bits = values.view(mx.uint32)
        self._rests[name] = (bits & 0xFFFF).astype(mx.uint16)
        self.computed[name] = ((bits + _HALF) >> 16).astype(mx.uint16).view(mx.bfloat16)

    @property
    def kept(self) -> Arrays:
        return self._rests


class MlxRoundedWeights(MlxWeights):
    """Bfloat16 parameters alone: updates are rounded to them stochastically."""

    def __init__(self, weights: Mapping[str, Any], seed: int) -> None:
        self.computed = {name: array.astype(mx.bfloat16) for name, array in weights.items()}
        self._seed, self._places = seed, {name: place for place, name in enumerate(sorted(weights))}

    def values(self, name: str) -> Any:
        return self.computed[name].astype(mx.float32)

    def store(self, name: str, values: Any, update: int | None = None) -> None:
        if update is None:
            self.computed[name] = values.astype(mx.bfloat16)
            return
        bits = round_stochastically(values.flatten(), key_of(self._seed, update, self._places[name]))
        self.computed[name] = bits.view(mx.bfloat16).reshape(values.shape)


def round_stochastically(values: Any, key: tuple[int, int]) -> Any:
    """The bits of bfloat16 values, in uint16: as `stochastic_rounding.rounded`."""
    high, low = (mx.array(word, mx.uint32) for word in key)
    if values.size <= _BLOCK_VALUES or mx.default_device() != mx.Device(mx.cpu):
        return _rounded(values, mx.arange(values.size, dtype=mx.uint32), high, low)
    count, made = mx.arange(_BLOCK_VALUES, dtype=mx.uint32), list[Any]()
    for first in range(0, values.size, _BLOCK_VALUES):
        part = values[first : first + _BLOCK_VALUES]
        made.append(_rounded(part, count[: part.size] + mx.array(first % (1 << 32), mx.uint32), high, low))
        mx.eval(made[-1])
    return mx.concatenate(made)


def _rounded(values: Any, elements: Any, high: Any, low: Any) -> Any:
    random = _fmix(_fmix(elements ^ low) + high) >> 16
    return ((values.view(mx.uint32) + random) >> 16).astype(mx.uint16)


def _fmix(x: Any) -> Any:
    x = (x ^ (x >> 16)) * mx.array(FIRST_FACTOR, mx.uint32)
    x = (x ^ (x >> 13)) * mx.array(SECOND_FACTOR, mx.uint32)
    return x ^ (x >> 16)
