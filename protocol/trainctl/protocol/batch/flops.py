"""Floating-point operations of a training step, and which part of a device's peak they are. Pure.

Per token, a matrix of n parameters takes 2 n in the forward pass, 2 n for the gradient of its input and 2 n for its
own: 6 n if it is trained, 4 n if it is frozen, and 2 n if nothing before it is trained either. Attention of L layers
with H heads of size d over s tokens takes 6 L H d s per token, half of what PaLM counts, because a token attends only
to those before it (Chowdhery et al., 2022, appendix B). An embedding is looked up, which takes none; a head takes
some, also a tied one. Not counted is what the model itself doesn't need: layers computed again for gradient
checkpointing, padding, and a reference's passes.
"""

import math
import re
from typing import Final, NamedTuple

from trainctl.protocol.batch.device_table import datasheet_tflops
from trainctl.protocol.calibration.profile import ProfileSummary
from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import AdapterTable

FORWARD, FROZEN, TRAINED = 2, 4, 6
"""Operations per token and parameter of a matrix: nothing before it is trained, it is frozen, it is trained."""
_EMBEDDING: Final = re.compile(r"(?:^|\.)embed_tokens\.weight$")
_HEAD: Final = re.compile(r"(?:^|\.)lm_head\.weight$")
_LOOKED_UP: Final = re.compile(r"(?:^|\.)(?:embed_tokens_per_layer|embed_positions|wpe)\.weight$")
_LAYER: Final = re.compile(r"\.layers\.(\d+)\.")
_ATTENTION_OUT: Final = re.compile(r"\.self_attn\.(?:o_proj|out_proj|dense)\.weight$")


class StepFlops(NamedTuple):
    """The floating-point operations of one model, as a run trains it."""

    per_token: float  # of all matrices
    per_token_pair: float  # of attention: per token, and per token of its sequence

    def of(self, tokens: float, sequences: int) -> float:
        """Return the operations of so many tokens in sequences of like length."""
        return tokens * (self.per_token + self.per_token_pair * tokens / max(sequences, 1))


def step_flops(adapter: AdapterTable, facts: ModelFacts | None, where: str) -> StepFlops | None:
    """Return the operations of a model that is trained whole, or beside adapters. None if its sizes aren't known, or if
    not every token passes through all its matrices, as with experts, or with an encoder and a decoder. Raises
    InvalidInputError for adapters of layers that it doesn't have."""
    if facts is None or facts.crossing or any("expert" in name for name in facts.shapes):
        return None
    matrices = _matrices(facts)
    heads_width = _heads_width(facts)
    if adapter.kind == "full":
        return StepFlops(TRAINED * sum(matrices.values()), TRAINED * facts.layers * heads_width)
    found = adapted_layers(adapter, facts.shapes, where)
    first = min(_layer(f"{name}.weight") or 0 for name in found.shapes)
    frozen = sum(size * (FORWARD if _is_before(name, first) else FROZEN) for name, size in matrices.items())
    added = adapter.rank * sum(rows + columns for rows, columns in found.shapes.values())
    attending = FORWARD * first + TRAINED * (facts.layers - first)
    return StepFlops(frozen + TRAINED * added, attending * heads_width)


def _matrices(facts: ModelFacts) -> dict[str, int]:
    """Parameters of those that tokens are multiplied by. Embeddings are only looked up, unless they are also the
    head."""
    has_head = any(_HEAD.search(name) for name in facts.shapes)
    looked_up = [name for name in facts.shapes if _LOOKED_UP.search(name) or (has_head and _EMBEDDING.search(name))]
    return {name: math.prod(shape) for name, shape in facts.shapes.items() if len(shape) == 2 and name not in looked_up}


def _heads_width(facts: ModelFacts) -> int:
    """H d: columns of the matrix that attention's output passes through, where its name is known."""
    found = (shape[1] for name, shape in facts.shapes.items() if len(shape) == 2 and _ATTENTION_OUT.search(name))
    return next(found, facts.width)


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return int(found[1]) if found is not None else None


def _is_before(name: str, first: int) -> bool:
    """Return whether a matrix is in a layer below the first one with an adapter: no gradient reaches it."""
    number = _layer(name)
    return number is not None and number < first


def peak_parts(flops_per_second: float, device: str, dtype: str, profile: ProfileSummary | None) -> dict[str, float]:
    """Return, by metric, the part of the device's peak: of its own measured matrix products, and of its datasheet.
    Absent where the peak isn't known."""
    measured = profile.gflops.get(dtype) if profile is not None else None
    stated = datasheet_tflops(device, dtype)
    found = {"matmul_use": (measured, 1e9), "mfu": (stated, 1e12)}
    return {name: flops_per_second / (peak * unit) for name, (peak, unit) in found.items() if peak}
