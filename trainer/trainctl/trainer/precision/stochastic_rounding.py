"""Stochastic rounding of float32 to bfloat16, by a specified integer generator: the same bits in NumPy, torch and MLX.

A value is rounded up or down at random, with probabilities that make the expected result the value itself. So updates
far below a weight's last place still move it, on average by what they should (Gupta et al. 2015).

Specification. All arithmetic is on unsigned 32-bit integers, wrapping; `mix` is SplitMix64's (see data/permutation.py):

    fmix(x):   x ^= x >> 16;  x *= 0x85EBCA6B;  x ^= x >> 13;  x *= 0xC2B2AE35;  x ^= x >> 16
               (the finaliser of MurmurHash3: Appleby 2011)
    word     = mix(mix(mix(seed) + update) + place), in 64 bits
    high,low = word >> 32, word & 0xFFFFFFFF
    random_i = fmix(fmix(i ^ low) + high) >> 16
    rounded  = (bits + random_i) >> 16

`seed` is the run's, `update` counts updates from 1, `place` is the parameter's among the sorted names, i is the
element's place in the parameter (row-major, modulo 2^32), `bits` are those of its float32 value, and `rounded` those of
the bfloat16. Values are finite; one that rounds beyond the largest becomes infinite.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

FIRST_FACTOR: Final = 0x85EBCA6B
SECOND_FACTOR: Final = 0xC2B2AE35
_MASK = (1 << 64) - 1


def key_of(seed: int, update: int, place: int) -> tuple[int, int]:
    """The words `high` and `low`, for a parameter in one update."""
    word = _mix((_mix((_mix(seed) + update) & _MASK) + place) & _MASK)
    return word >> 32, word & 0xFFFFFFFF


def rounded(values: NDArray[np.float32], key: tuple[int, int], first: int = 0) -> NDArray[np.uint16]:
    """The bits of the bfloat16 values of flat `values`, which are the elements from `first` on. The reference: other
    libraries' implementations are tested against it."""
    high, low = key
    counter = np.arange(first, first + len(values), dtype=np.uint64).astype(np.uint32)
    random = _fmix(_fmix(counter ^ np.uint32(low)) + np.uint32(high)) >> np.uint32(16)
    return ((values.view(np.uint32) + random) >> np.uint32(16)).astype(np.uint16)


def _fmix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    x = (x ^ (x >> np.uint32(16))) * np.uint32(FIRST_FACTOR)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(SECOND_FACTOR)
    return x ^ (x >> np.uint32(16))


def _mix(x: int) -> int:
    """SplitMix64's output function."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)
