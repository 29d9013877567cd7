"""Results of plans beside training, from what the ranks report: evaluations and probes. Pure.

In a probe, ranks are judged by their outputs for the same tokens, which show whether they hold the same model. The
largest difference of one token's log-probability decides. A mean hides it: with another RoPE base the mean loss moved
by 1e-6 and logits by 1.6e-2.
"""

import dataclasses
import itertools
import math
import statistics
import struct
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from operator import attrgetter

from trainctl.protocol.config.objectives import HELD_OUT, objective_of
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.messages import EvaluationReport, Probed, Report, Values


@dataclasses.dataclass(frozen=True)
class Result:
    """Over all held-out samples."""

    loss: float  # nats per unit of weight, each term divided by its own; NaN without any weight
    weight: float  # the first one, which rates are per
    values: dict[str, float]  # metrics beside the loss, by name


def evaluation(config: RunFile, reports: Sequence[Report]) -> Result:
    """Return the result of an evaluation from the ranks' reports, in an order that is always the same."""
    objective = objective_of(config.objective, config.data.kind)
    unit = objective.weight_unit
    parts = [_parts(report, unit) for report in reports]
    losses, weights, sums = (_summed(part) for part in zip(*parts, strict=True))
    terms = [_mean(losses.get(name, 0.0), weights.get(name, 0.0)) for name in objective.weights]
    values = {
        HELD_OUT + metric.name: _mean(sums[metric.name], weights.get(metric.weight, 0.0))
        for metric in objective.evaluated
        if metric.name in sums
    }
    return Result(sum(terms), weights.get(unit, 0.0), values)


def _parts(report: Report, unit: str) -> tuple[Values, Values, Values]:
    """Losses, weights and sums by name; of a simulated rank, the loss alone."""
    if isinstance(report, EvaluationReport):
        return report.losses, report.weights, report.sums
    return {unit: report.loss_sum}, {unit: report.weight}, {}


def _summed(parts: Iterable[Values]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums


def _mean(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


NOISE_MULTIPLE = 20.0
"""Multiple of two ranks' rounding noise by which they may differ. Ranks of one model were apart by 0.6 to 6 times their
noise; the least fault that was tried, another epsilon of the norms, by 100 times."""
MIN_MULTIPLE = 8.0
"""Multiple of the noise that is tolerated even above `MAX_TOLERANCE`, since ranks of one model are that far apart."""
MIN_TOLERANCE = 1e-5
"""Nats. The noise of a very small model says little."""
MAX_TOLERANCE = {False: 0.05, True: 1.0}
"""Nats, by whether the run allows TF32. Above it, only `MIN_MULTIPLE` times the noise is tolerated."""
MAX_UNLIKE = 10.0
"""Ratio of two ranks' noises above which the larger one doesn't count: a fault could widen its own limit."""
UNMEASURED_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.5, "float16": 0.1}
"""Nats, by the run's data type, where a rank of version 0.2 reports no noise."""
WEIGHTS_APART = 1e-4
"""Relative difference of a parameter's norms above which weights differ; rounding stays below 1e-6."""
TF32_RATIO = 2.0**13
"""Rounding of TF32 over rounding of float32: 10 bits of mantissa against 23."""
FIRST_TOKENS_PART = 0.1
"""Fraction of the largest difference below which first tokens count as equal. RoPE doesn't change a sample's first
token, which attends only to itself."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of a rank's results from another one's."""

    rank: int
    other: int
    largest: float  # nats, of one token's log-probability; infinite where only one is a number
    tokens: int  # compared
    limit: float  # nats: the largest difference of two ranks of one model
    weights: float = 0.0  # the largest relative difference of a parameter's norm

    @property
    def is_refused(self) -> bool:
        """True if the two hold unlike models. Norms count too: one weight that is off moves few tokens."""
        return not (self.largest <= self.limit and self.weights <= WEIGHTS_APART)

    @property
    def distance(self) -> tuple[bool, float]:
        """The order of pairs: first by weights that differ, then by the difference in multiples of its limit."""
        return self.weights > WEIGHTS_APART, self.largest / self.limit


@dataclasses.dataclass(frozen=True)
class Precision:
    """A run's data type, and whether it allows TF32."""

    dtype: str
    tf32: bool


def tolerance(own: Probed, other: Probed, precision: Precision) -> float:
    """Return the largest difference, in nats, that two ranks of one model may show."""
    if own.noise is None or other.noise is None:
        return UNMEASURED_TOLERANCE[precision.dtype]
    most, noises = MAX_TOLERANCE[precision.tf32], (own.noise, other.noise)
    if not all(map(math.isfinite, noises)):
        return most
    noise = min(max(noises), max(MAX_UNLIKE * min(noises), MIN_TOLERANCE / NOISE_MULTIPLE))
    return max(MIN_TOLERANCE, min(NOISE_MULTIPLE * noise, max(most, MIN_MULTIPLE * noise)))


def first_layer(own: Probed, other: Probed) -> tuple[int, int] | None:
    """Return the first decoder layer, from 0, whose hidden states differ by more than rounding, and the number of
    layers. The first layer past the last means that only the final norm or the head differs; None: layers weren't
    reported, or not the same."""
    noise, others_noise = _values(own.layer_noise), _values(other.layer_noise)
    count = len(noise)
    if not count or count != len(others_noise) or len(own.layers) != len(other.layers):
        return None
    values, others = _values(own.layers), _values(other.layers)
    width = len(values) // count
    if not width or len(values) != count * width:
        return None
    for layer in range(count):
        span = slice(layer * width, (layer + 1) * width)
        gap = max(_gap(*pair) for pair in zip(values[span], others[span], strict=True))
        if not gap <= NOISE_MULTIPLE * max(noise[layer], others_noise[layer]):
            return layer, count
    return count, count


def compare(probes: Mapping[int, Probed], passed: Collection[int], precision: Precision) -> list[Difference]:
    """Return how far each rank that is new is from the nearest of those that have `passed`. If none has, return the one
    pair of ranks that are furthest apart, the odd one out first."""
    if passed:
        return [
            min((difference(probes, rank, other, precision) for other in passed), key=attrgetter("distance"))
            for rank in sorted(probes.keys() - passed)
        ]
    pairs = [difference(probes, rank, other, precision) for other, rank in itertools.combinations(sorted(probes), 2)]
    worst = max(pairs, key=attrgetter("distance"))
    if _median_distance(probes, worst.other, precision) > _median_distance(probes, worst.rank, precision):
        worst = dataclasses.replace(worst, rank=worst.other, other=worst.rank)
    return [worst]


def difference(probes: Mapping[int, Probed], rank: int, other: int, precision: Precision) -> Difference:
    """Return the largest difference between two ranks; infinite if they saw unlike tokens."""
    own, its = probes[rank], probes[other]
    gaps, limit = _gaps(own, its), tolerance(own, its, precision)
    return Difference(rank, other, max(gaps, default=0.0), len(gaps), limit, _weights_apart(own, its))


def likely_cause(own: Probed, other: Probed, names: tuple[str, str]) -> str:
    """Return what most probably makes two ranks, whose `names` are given, differ, and what to look at."""
    gaps = _gaps(own, other)
    largest = max(gaps, default=0.0)
    if (own.tokens_digest, own.lengths) != (other.tokens_digest, other.lengths):
        return "the tokenizer or the data (the probe's tokens differ); compare tokenizer.json and the data files"
    apart = _weights_apart(own, other)
    if not apart <= WEIGHTS_APART:
        return f"the weights (a parameter's norm has a relative difference of {apart:.1g}); compare the model's files"
    if (own.tf32 or other.tf32) and largest <= max(own.noise or 0.0, other.noise or 0.0) * TF32_RATIO:
        on = " and ".join(name for name, probed in zip(names, (own, other), strict=True) if probed.tf32)
        return f"TF32 is on; set tf32 = false in [model], and unset MLX_ENABLE_TF32 and NVIDIA_TF32_OVERRIDE on {on}"
    first = [gaps[start] for start in itertools.accumulate(own.lengths[:-1], initial=0)]
    if math.isfinite(largest) and max(first) <= FIRST_TOKENS_PART * largest:
        return "the RoPE settings (only tokens after a sample's first differ); compare config.json's rope_parameters"
    return "the model's code; compare config.json and the versions of transformers and mlx-lm"


def refusal(each: Difference, probes: Mapping[int, Probed], label: Callable[[int], str]) -> str:
    """Return why the rank of a difference is refused, with the likely cause."""
    names = rank, other = label(each.rank), label(each.other)
    own, its = probes[each.rank], probes[each.other]
    text = f"probe: {rank} differs from {other} by {each.largest:.2g} in a token's log-probability"
    where, first = "", first_layer(own, its)
    if first is not None:
        layer, layers = first
        where = f"; from layer {layer} of {layers} on" if layer < layers else "; after the last layer"
    return f"{text} (tolerance {each.limit:.2g}{where}); likely cause: {likely_cause(own, its, names)}"


def _median_distance(probes: Mapping[int, Probed], rank: int, precision: Precision) -> float:
    distances = (difference(probes, rank, other, precision).distance[1] for other in probes if other != rank)
    return statistics.median(distances)


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
