"""The model families that are tested, and how closely the gradients of two libraries agree.

Tested: random models of the family, in torch and MLX, against transformers' eager attention. docs/training.md has the
same table.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainctl.protocol.config.model_facts import context_limit
from trainctl.protocol.config.objectives import OBJECTIVES, ObjectiveName
from trainctl.protocol.errors import InvalidInputError


@dataclass(frozen=True)
class Family:
    """A tested family. The tolerance applies to float32."""

    title: str
    gradient: float  # of a parameter, relative to its norm
    neutral_norm: float = 1.0  # weight of a norm that scales nothing; 0 where the model adds 1 to it


TESTED: Final[dict[str, Family]] = {
    "llama": Family("Llama", 1e-5),
    "mistral": Family("Mistral", 1e-5),
    "qwen2": Family("Qwen2", 1e-5),
    "qwen3": Family("Qwen3", 1e-5),
    "gemma2": Family("Gemma 2", 1e-5, 0.0),
    "gemma3_text": Family("Gemma 3", 1e-5, 0.0),
    "phi3": Family("Phi-3", 1e-5),
    "smollm3": Family("SmolLM3", 1e-5),
    "cohere": Family("Command R", 1e-5),
    "gemma": Family("Gemma", 1e-5, 0.0),
    "gemma4_text": Family("Gemma 4", 1e-4),
    "glm4": Family("GLM-4-0414", 1e-5),
    "granite": Family("Granite", 1e-5),
    "ministral3": Family("Ministral 3", 1e-5),
    "olmo2": Family("OLMo 2", 1e-5),
    "olmo3": Family("OLMo 3", 1e-5),
    "phi": Family("Phi", 1e-5),
    "stablelm": Family("StableLM", 1e-5),
    "starcoder2": Family("StarCoder2", 1e-5),
}
"""By `model_type` in config.json."""
ENCODER_DECODERS: Final = {"t5": "T5", "bart": "BART"}
"""Tested on torch alone, with `objective.kind = "seq2seq"`; mlx-lm has no such models."""


def check_random(config: Path, where: str) -> None:
    """Check whether the model of a config.json can be trained from scratch. Raises InvalidInputError, blaming
    `where`."""
    family = str(json.loads(config.read_text(encoding="utf-8")).get("model_type", "unknown"))
    if family not in TESTED:
        problem = f'model.init = "random" knows the model types {", ".join(sorted(TESTED))}, not {family!r}'
        raise InvalidInputError(where, problem)


def check_objective(model: Path, objective: ObjectiveName, length: int, where: str) -> None:
    """Check whether the model of a directory can learn what an objective teaches, from sequences of up to `length`
    tokens. Raises InvalidInputError, blaming a field of `where`; a configuration that isn't a JSON object is left to
    others."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    if not isinstance(config, dict):
        return
    _check_router(model, config, where)
    family, encodes = config.get("model_type", "unknown"), bool(config.get("is_encoder_decoder"))
    wanted = OBJECTIVES[objective].encodes_prompts
    if encodes and not wanted:
        problem = f'{family} is an encoder-decoder model: set objective.kind = "seq2seq"; this run has {objective!r}'
        raise InvalidInputError(f"{where}: objective.kind", problem)
    if wanted and not encodes:
        problem = f'"seq2seq" needs an encoder-decoder model, such as T5 or BART; {family} is a decoder: set "sft"'
        raise InvalidInputError(f"{where}: objective.kind", problem)
    positions = context_limit(config)
    if encodes and positions is not None and length > positions:
        problem = f"{length:,} is above the {positions:,} positions that {family} has: set at most {positions:,}"
        raise InvalidInputError(f"{where}: data.sequence_length", problem)


def _check_router(model: Path, config: Mapping[str, Any], where: str) -> None:
    """Refuse a mixture of experts whose loss would depend on micro-batches and ranks: one to whose loss transformers
    adds a product of means over all tokens of a batch, or whose router draws experts at random while it trains."""
    if config.get("model_type") == "phimoe":
        problem = "phimoe's router draws experts at random in training, so that a batch has another loss each time"
        raise InvalidInputError(f"{where}: model.path", f"{problem}; train another mixture")
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    if text.get("output_router_logits") is True and (weight := text.get("router_aux_loss_coef", 1)):
        adds = f"adds a loss of the router (router_aux_loss_coef {weight}), which is no sum over tokens"
        problem = f"{model / 'config.json'} {adds}: set output_router_logits to false there"
        raise InvalidInputError(f"{where}: model.path", problem)


def untested(family: str) -> str | None:
    """Return what to say about a model whose family isn't tested; None for one that is."""
    if family in TESTED or family in ENCODER_DECODERS:
        return None
    known = ", ".join(sorted([*(one.title for one in TESTED.values()), *ENCODER_DECODERS.values()]))
    return f"model family {family or 'unknown'!r} is untested; tested families: {known}"
