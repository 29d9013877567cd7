"""Probes: whether ranks hold the same model, judged by their outputs for the same tokens.

The largest difference of one token's log-probability decides. A mean hides it: with another RoPE base the mean loss
moved by 1e-6 and logits by 1.6e-2.
"""

import itertools
import math
import statistics
import struct
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from trainctl.protocol.config.families import TESTED
from trainctl.protocol.messages import Probed

DTYPE_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""Largest difference in nats. Measured over 512 tokens, torch against MLX on CPUs, random models of 15 families: at
most 1.8e-5 in float32, 0.19 in bfloat16 and 0.023 in float16 with large weights; 5e-6, 0.014 and 0.002 with a new
model's small ones."""
WEIGHTS_APART = 1e-4
"""Relative difference of a parameter's norms above which weights differ; rounding stays below 1e-6."""
TF32_DIFFERENCE = 5e-3
"""Largest difference in nats that TF32 alone explains: 3e-4 to 8e-4 were measured."""
FIRST_TOKENS_PART = 0.1
"""Fraction of the largest difference below which first tokens count as equal. RoPE doesn't change a sample's first
token, which attends only to itself."""


class Difference(NamedTuple):
    """How far a rank is from another one."""

    rank: int
    other: int
    largest: float  # nats, of one token's log-probability; infinite where only one is a number
    tokens: int  # compared
    weights: float = 0.0  # the largest relative difference of a parameter's norm

    def exceeds(self, limit: float) -> bool:
        """Whether the two hold unlike models. Weights count by their norms too: at 16 bits a tolerance of the
        log-probabilities that rounding needs would let weights pass that are some per cent apart."""
        return not (self.largest <= limit and self.weights <= WEIGHTS_APART)


def tolerance(family: str, dtype: str, *, tf32: bool = False) -> float:
    """The largest difference, in nats, that two ranks of one model may show."""
    if dtype == "float32" and tf32:
        return TF32_DIFFERENCE
    if dtype == "float32" and family in TESTED:
        return TESTED[family].log_probability
    return DTYPE_TOLERANCE[dtype]


def compare(probes: Mapping[int, Probed], passed: Collection[int]) -> list[Difference]:
    """How far each rank that is new is from the nearest of those that have `passed`. If none has, the one pair of ranks
    that are furthest apart, the odd one out first."""
    if passed:
        return [
            min((difference(probes, rank, other) for other in passed), key=_distance)
            for rank in sorted(probes.keys() - passed)
        ]
    pairs = [difference(probes, rank, other) for other, rank in itertools.combinations(sorted(probes), 2)]
    worst = max(pairs, key=_distance)
    if _median_distance(probes, worst.other) > _median_distance(probes, worst.rank):
        worst = worst._replace(rank=worst.other, other=worst.rank)
    return [worst]


def difference(probes: Mapping[int, Probed], rank: int, other: int) -> Difference:
    """The largest one between two ranks; infinite if they saw unlike tokens."""
    own, its = probes[rank], probes[other]
    gaps = _gaps(own, its)
    return Difference(rank, other, max(gaps, default=0.0), len(gaps), _weights_apart(own, its))


def likely_cause(own: Probed, other: Probed, names: tuple[str, str]) -> str:
    """What most probably makes two ranks, whose `names` are given, differ, and what to look at."""
    gaps = _gaps(own, other)
    largest = max(gaps, default=0.0)
    if (own.tokens_digest, own.lengths) != (other.tokens_digest, other.lengths):
        return "the tokenizer or the data (the probe's tokens differ); compare tokenizer.json and the data files"
    apart = _weights_apart(own, other)
    if not apart <= WEIGHTS_APART:
        return f"the weights (a parameter's norm has a relative difference of {apart:.1g}); compare the model's files"
    if (own.tf32 or other.tf32) and largest <= TF32_DIFFERENCE:
        on = " and ".join(name for name, probed in zip(names, (own, other), strict=True) if probed.tf32)
        return f"TF32 is on; set tf32 = false in [model], and unset MLX_ENABLE_TF32 and NVIDIA_TF32_OVERRIDE on {on}"
    first = [gaps[start] for start in itertools.accumulate(own.lengths[:-1], initial=0)]
    if math.isfinite(largest) and max(first) <= FIRST_TOKENS_PART * largest:
        return "the RoPE settings (only tokens after a sample's first differ); compare config.json's rope_parameters"
    return "the model's code; compare config.json and the versions of transformers and mlx-lm"


def _distance(found: Difference) -> tuple[bool, float]:
    return found.weights > WEIGHTS_APART, found.largest


def _median_distance(probes: Mapping[int, Probed], rank: int) -> float:
    return statistics.median(difference(probes, rank, other).largest for other in probes if other != rank)


def _gaps(own: Probed, other: Probed) -> list[float]:
    """By how much each token's log-probability differs."""
    one, two = _values(own.log_probabilities), _values(other.log_probabilities)
    if own.tokens_digest != other.tokens_digest or len(one) != len(two):
        return [math.inf] * max(len(one), len(two), 1)
    return [_gap(*pair) for pair in zip(one, two, strict=True)]


def _gap(one: float, two: float) -> float:
    if one == two or (math.isnan(one) and math.isnan(two)):
        return 0.0
    return abs(one - two) if math.isfinite(one) and math.isfinite(two) else math.inf


def _weights_apart(own: Probed, other: Probed) -> float:
    return max(_relative(_values(own.weight_norms), _values(other.weight_norms)), default=0.0)


def _relative(one: Sequence[float], two: Sequence[float]) -> list[float]:
    if len(one) != len(two):
        return [math.inf]
    return [gap / max(abs(a), abs(b)) if (gap := _gap(a, b)) else 0.0 for a, b in zip(one, two, strict=True)]


def _values(packed: bytes) -> tuple[float, ...]:
    """Float32, little endian."""
    return struct.unpack(f"<{len(packed) // 4}f", packed[: len(packed) // 4 * 4])
