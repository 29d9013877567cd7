"""Dropout of adapters: a function of seed, position, token, layer and channel, so that a curve stays one curve.

Whatever rank or backend processes a sample, the same elements are dropped. All arithmetic is on 32-bit integers that
wrap; `mix` is SplitMix64's (permutation.py), of which the low 32 bits are taken, and >> shifts zeros in:

    hash(x):    x ^= x >> 16;  x *= M;  x ^= x >> 16;  x *= M;  x ^= x >> 16        M = 0x45D9F3B (T. Mueller)
    token_i   = hash(mix(mix(seed) + position) + i)       input i of the sample at a position
    channel_j = hash(mix(mix(DROPOUT_KEY) + place) + j)   input j of the adapter at a place in the order of their names
    element   = (token_i ^ channel_j) * M;  element ^= element >> 16;  element *= M

An element is dropped if it is, as a signed integer, below dropout * 2^32 - 2^31. The others are divided by 1 - dropout.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.data.permutation import Indices, mix

Keys = NDArray[np.int32]
DROPOUT_KEY = 0x64726F70  # "drop"
_M = 0x45D9F3B


class TokenKeys:
    """The keys of the tokens in the micro-batch at hand, [B, L], which all layers of a model share; None: nothing is
    dropped."""

    value: Any = None


def token_keys(seed: int, positions: Indices, length: int) -> Keys:
    """Of the samples at `positions`, each padded to `length`."""
    return _keys(seed, positions, length)


def channel_keys(place: int, width: int) -> Keys:
    """Of an adapter's inputs."""
    return _keys(DROPOUT_KEY, np.array([place]), width).reshape(width)


def threshold(dropout: float) -> int:
    """The least element that is kept."""
    return round(dropout * 2**32) - 2**31


def kept(tokens: Any, channels: Any, least: int) -> Any:
    """Which elements stay, [B, L, channels]; keys in int32 arrays of any library."""
    element = (tokens[..., None] ^ channels) * _M
    element = (element ^ ((element >> 16) & 0xFFFF)) * _M
    return element >= least


def _keys(seed: int, places: Indices, count: int) -> Keys:
    rows = mix(mix(np.array([seed], np.uint64)) + places.astype(np.uint64)).astype(np.uint32)
    x: Any = rows[:, None] + np.arange(count, dtype=np.uint32)
    for _ in range(2):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(_M)
    keys: Keys = (x ^ (x >> np.uint32(16))).view(np.int32)
    return keys
