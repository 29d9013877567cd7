"""Whether a model keeps the documents of a pack apart, tried on two short ones after it is loaded."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.attention.document_bounds import VARLEN
from trainctl.trainer.backends.base import Array, Backend, BackendName
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.batch import packed

_TARGETS = 12  # of each document
_LEAK: Final = 1e-6
"""Change of a token's log-probability that another document may cause; a masked one changes no bit."""
_MOVED: Final = 1e-3
"""Change that packing may cause by rounding in float32, in which the tokens are evaluated: in bfloat16 it is 0.2 for a
trained model of 135 million parameters."""
_MOVED_LOW: Final = 1.0
"""Change that packing may cause with a kernel that computes in 16 bits alone."""
_ODD: Final = (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError)
"""What a model raises whose cache is unlike mlx-lm's, or whose attention can't be that which was asked for."""


def check(backend: Backend, vocabulary: int | None, where: str) -> None:
    """Raises InvalidInputError if the loaded model cannot train packed samples on its backend."""
    first, other, second = np.random.default_rng(0).integers(0, min(vocabulary or 64, 64), (3, _TARGETS + 1))
    try:
        alone, after_first, after_other = (
            _second(backend, *documents) for documents in ((second,), (first, second), (other, second))
        )
        allowed = _MOVED_LOW if backend.compute.attention == VARLEN else _MOVED
        apart, reason = _largest(after_first - after_other) <= _LEAK and _largest(after_first - alone) <= allowed, ""
    except _ODD as error:
        apart, reason = False, f" ({first_line(error)})"
    if not apart:
        raise _refusal(backend, reason, where)


def _refusal(backend: Backend, reason: str, where: str) -> InvalidInputError:
    if backend.compute.attention == VARLEN:
        problem = f'"{VARLEN}" can\'t keep packed samples apart in this model{reason}; set attention = "auto"'
        return InvalidInputError(f"{where}: model.attention", problem)
    return InvalidInputError(
        f"{where}: data.packing",
        f'on {backend.name}, this model\'s attention crosses the borders of packed samples; set data.packing = "none"',
    )


def check_positions(backend: BackendName, config: Mapping[str, Any], length: int, where: str) -> None:
    """Raises InvalidInputError for a model whose queries are scaled by their position in the row where it should be
    that in their document, as Ministral 3's are on MLX from `original_max_position_embeddings` on."""
    table = config.get("rope_parameters") or {}
    unscaled = table.get("original_max_position_embeddings", length)
    if backend == "mlx" and table.get("llama_4_scaling_beta") and length > unscaled:
        raise InvalidInputError(
            f"{where}: data.packing",
            f"on mlx, this model can't train packed samples of more than {unscaled} tokens; "
            f'set data.packing = "none", or data.sequence_length to at most {unscaled}',
        )


def _second(backend: Backend, *documents: Array) -> Array:
    """Log-probabilities of the last document's tokens, the documents in one pack beside a pack with other borders."""
    beside = [documents[-1][: _TARGETS // 2], documents[-1]]
    parts = [*documents, *beside]
    sizes = np.array([len(part) for part in parts])
    rows = np.repeat([0, 1], [len(documents), len(beside)])
    tokens = np.concatenate(parts)
    packs = packed(tokens, np.ones(len(tokens), np.uint8), np.cumsum(sizes) - sizes, sizes - 1, rows)
    last = (len(documents) - 1) * _TARGETS
    if backend.compute.attention == VARLEN:
        return backend.token_log_probabilities(packs)[0, last : last + _TARGETS]
    return backend.probe(packs, 0).log_probabilities[last : last + _TARGETS]


def _largest(differences: Array) -> float:
    return float(np.abs(differences).max())
