"""First weights of a model that is trained from scratch, the same bits on every rank and backend.

Matrices are uniform with mean 0 and the standard deviation that config.json states as `initializer_range`, as Llama's,
GPT-2's and others' (0.02 if it doesn't), which transformers draws from a normal distribution. Biases are 0, and norms
start without effect. The numbers come from `mix` over a counter keyed by the run's seed and the weight's place among
the sorted names.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.families import TESTED
from trainctl.trainer.data.permutation import mix, uniform

_STANDARD_DEVIATION = 0.02
"""Of matrices, where config.json has none: transformers' default."""


def random_weights(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], seed: int
) -> dict[str, NDArray[np.float32]]:
    """Values for each of `shapes`. `config`: the model's config.json, of a tested family."""
    bound = config.get("initializer_range", _STANDARD_DEVIATION) * math.sqrt(3)  # uniform in +-b: deviation b / sqrt 3
    norm = TESTED[config["model_type"]].neutral_norm
    key = int(mix(np.array([seed], np.uint64))[0])
    values = {}
    for place, (name, shape) in enumerate(sorted(shapes.items())):
        if len(shape) >= 2:
            values[name] = uniform(shape, key + place, bound)
        else:
            values[name] = np.full(shape, 0.0 if name.endswith(".bias") else norm, np.float32)
    return values
