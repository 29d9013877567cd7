"""What a model directory's config.json and the heads of its weight files say, read without a tensor library."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config import input_checks, quantization


class ModelFacts(NamedTuple):
    """A language model's size."""

    family: str  # `model_type`
    shapes: Mapping[str, tuple[int, ...]]  # of each weight by its stored name; a tied head isn't there twice.
    # Without weight files: of a Llama's matrices
    width: int  # of hidden states
    intermediate: int  # width of the feed-forward layers
    layers: int  # of an encoder-decoder model: those of both
    heads: int
    vocabulary: int
    positions: int | None = None  # longest sequence that it was made for, where it says so
    quantized: Mapping[str, int] = {}  # bytes of each weight that is stored packed
    crossing: int = 0  # layers that also attend to an encoder's states


def read_facts(model: Path, where: str) -> ModelFacts | None:
    """Of a Hugging Face directory; None if its configuration doesn't state these sizes. Raises InvalidInputError
    blaming `where`, for a file that cannot be read."""
    input_checks.check_json(model / "config.json", where)
    whole: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    config = whole["text_config"] if isinstance(whole.get("text_config"), dict) else whole
    if whole.get("is_encoder_decoder"):
        return _encoder_decoder(whole, _stored(model, where))
    sizes: list[Any] = [
        config.get(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    stored = _stored(model, where)
    shapes = quantization.whole_shapes(stored, whole) or _matrices(config, *sizes)
    if config.get("tie_word_embeddings", False) and "model.embed_tokens.weight" in shapes:
        shapes.pop("lm_head.weight", None)
    stated = config.get("intermediate_size")
    intermediate = stated if isinstance(stated, int) else 4 * sizes[0]
    stated = config.get("max_position_embeddings")
    positions = stated if isinstance(stated, int) and stated > 0 else None
    width, layers, heads, vocabulary = sizes
    family = str(whole.get("model_type", ""))
    quantized = quantization.quantized_bytes(stored)
    return ModelFacts(family, shapes, width, intermediate, layers, heads, vocabulary, positions, quantized)


def _encoder_decoder(config: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> ModelFacts | None:
    """By the names of T5 and BART, of which both have a matrix of embeddings under three names."""
    encoder = _first(config, "encoder_layers", "num_layers")
    decoder = _first(config, "decoder_layers", "num_decoder_layers") or encoder
    width, vocabulary = _first(config, "d_model"), _first(config, "vocab_size")
    heads = _first(config, "encoder_attention_heads", "num_heads")
    if not (encoder and decoder and width and vocabulary and heads):
        return None
    shared = {f"{half}.embed_tokens.weight" for half in ("encoder", "decoder", "model.encoder", "model.decoder")}
    tied = shared | ({"lm_head.weight"} if config.get("tie_word_embeddings", True) else set())
    own = {name: shape for name, shape in shapes.items() if name not in tied}
    inner = max(_first(config, key) or 0 for key in ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim")) or 4 * width
    return ModelFacts(
        str(config.get("model_type", "")), own, width, inner, encoder + decoder, heads, vocabulary,
        _first(config, "max_position_embeddings"), crossing=decoder,
    )  # fmt: skip


def _first(config: dict[str, Any], *keys: str) -> int | None:
    """The first of these values that is a whole number above 0."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


def weight_files(model: Path) -> list[Path]:
    """The files of a directory's weights: model*.safetensors, or all *.safetensors if there is none. Others beside them
    have the same weights under other names, as consolidated.safetensors has."""
    return sorted(model.glob("model*.safetensors")) or sorted(model.glob("*.safetensors"))


def _stored(model: Path, where: str) -> dict[str, tuple[int, ...]]:
    return {
        name: shape for file in weight_files(model) for name, shape in input_checks.stored_shapes(file, where).items()
    }


def _matrices(
    config: dict[str, Any], width: int, layers: int, heads: int, vocabulary: int
) -> dict[str, tuple[int, ...]]:
    """Those of a Llama of these sizes."""
    inner, groups = config.get("intermediate_size", 4 * width), config.get("num_key_value_heads") or heads
    head = config.get("head_dim") or width // heads
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, width)}
    if not config.get("tie_word_embeddings", False):
        found["lm_head.weight"] = (vocabulary, width)
    for layer in (f"model.layers.{number}" for number in range(layers)):
        found |= {f"{layer}.self_attn.{name}_proj.weight": (head * count, width)
                  for name, count in (("q", heads), ("k", groups), ("v", groups))}  # fmt: skip
        found[f"{layer}.self_attn.o_proj.weight"] = (width, head * heads)
        found |= {f"{layer}.mlp.{name}_proj.weight": (inner, width) for name in ("gate", "up")}
        found[f"{layer}.mlp.down_proj.weight"] = (width, inner)
    return found
