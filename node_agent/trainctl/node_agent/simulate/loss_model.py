"""The loss of a simulated run: a power law of the samples trained on, with noise. It says nothing about a real model.

    loss(n) = E + (L0 - E) (1 + n / n0)^-0.3

n is the number of samples trained on, L0 the first loss (the logarithm of the vocabulary, if that is known), E = 1.7
and n0 = 20 global batches. Losses of language models fall as a power of the data (Hestness et al., 2017; Kaplan et
al., 2020). A step's loss differs from the curve by 1.5 % (standard deviation).
"""

import math
import random
from functools import lru_cache
from typing import Final, NamedTuple

FIRST_LOSS: Final = 9.0
"""Where no vocabulary is known: nats per token."""
LEAST_LOSS: Final = 1.7
EXPONENT: Final = 0.3
HALF_BATCHES: Final = 20
NOISE: Final = 0.015
HELD_OUT_GAP: Final = 0.02
"""Nats by which the held-out loss is above the curve."""


class LossModel(NamedTuple):
    """Of one run."""

    seed: int
    first: float  # nats per unit of weight
    scale: float  # samples

    @classmethod
    def of(cls, seed: int, global_batch: int, vocabulary: int | None) -> "LossModel":
        """`vocabulary`: number of tokens; None: not known."""
        first = math.log(vocabulary) if vocabulary and vocabulary > math.exp(LEAST_LOSS) else FIRST_LOSS
        return cls(seed, first, float(HALF_BATCHES * global_batch))

    def curve(self, samples: float) -> float:
        """After training on so many samples, without noise."""
        return LEAST_LOSS + (self.first - LEAST_LOSS) * math.pow(1 + samples / self.scale, -EXPONENT)

    @lru_cache(maxsize=64)  # noqa: B019  the key is a small tuple; each rank asks for the same
    def at_step(self, step: int, samples: int) -> tuple[float, float]:
        """(loss, gradient norm) of a step that begins after `samples`. A step that is made again is the same."""
        chance = random.Random(f"{self.seed} loss {step} {samples}")
        loss = self.curve(samples) * max(1 + NOISE * chance.gauss(0, 1), 0.5)
        return loss, (0.5 + 0.2 * loss) * chance.lognormvariate(0, 0.1)

    def held_out(self, samples: int) -> float:
        """Of an evaluation after `samples`."""
        return self.curve(samples) + HELD_OUT_GAP
