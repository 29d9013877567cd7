"""What a model directory's config.json and the heads of its weight files say, read without a tensor library."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from trainctl.protocol.config import input_checks, quantization
from trainctl.protocol.config.stored_weights import has_own_head, stored_tensors

_LIMITS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_source_positions", "seq_length")
"""Keys of config.json under which families state their longest sequence."""
_POSITION_TABLES = ("wpe.weight", "embed_positions.weight", "position_embeddings.weight")


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
    tensors = stored_tensors(model, where)
    stored = {name: tensor.shape for name, tensor in tensors.items()}
    if whole.get("is_encoder_decoder"):
        return _encoder_decoder(whole, stored, has_own_head(tensors))
    sizes: list[Any] = [
        config.get(key) for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    ]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        return None
    shapes = quantization.whole_shapes(stored, whole) or _matrices(config, *sizes)
    is_tied = config.get("tie_word_embeddings", False) and not has_own_head(tensors)
    if is_tied and "model.embed_tokens.weight" in shapes:
        shapes.pop("lm_head.weight", None)
    stated = config.get("intermediate_size")
    intermediate = stated if isinstance(stated, int) else 4 * sizes[0]
    positions = context_limit(config, stored)
    width, layers, heads, vocabulary = sizes
    family = str(whole.get("model_type", ""))
    quantized = quantization.quantized_bytes(stored)
    return ModelFacts(family, shapes, width, intermediate, layers, heads, vocabulary, positions, quantized)


def context_limit(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]] = {}) -> int | None:
    """Return the longest sequence in tokens that a model takes, by its configuration and by the rows of its table of
    learned positions; None if neither states one. Models with relative positions alone, such as T5, have no limit."""
    if "relative_attention_num_buckets" in config:
        return None
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else {}
    limits = [value for part in (config, text) for key in _LIMITS if isinstance(value := part.get(key), int)]
    limits += [shape[0] for name, shape in shapes.items() if name.endswith(_POSITION_TABLES)]
    return min((limit for limit in limits if limit > 0), default=None)


def _encoder_decoder(config: dict[str, Any], shapes: dict[str, tuple[int, ...]], own_head: bool) -> ModelFacts | None:
    """By the names of T5 and BART, of which both have a matrix of embeddings under three names."""
    encoder = _first(config, "encoder_layers", "num_layers")
    decoder = _first(config, "decoder_layers", "num_decoder_layers") or encoder
    width, vocabulary = _first(config, "d_model"), _first(config, "vocab_size")
    heads = _first(config, "encoder_attention_heads", "num_heads")
    if not (encoder and decoder and width and vocabulary and heads):
        return None
    shared = {f"{half}.embed_tokens.weight" for half in ("encoder", "decoder", "model.encoder", "model.decoder")}
    is_tied = config.get("tie_word_embeddings", True) and not own_head
    tied = shared | ({"lm_head.weight"} if is_tied else set())
    own = {name: shape for name, shape in shapes.items() if name not in tied}
    inner = max(_first(config, key) or 0 for key in ("d_ff", "encoder_ffn_dim", "decoder_ffn_dim")) or 4 * width
    return ModelFacts(
        str(config.get("model_type", "")), own, width, inner, encoder + decoder, heads, vocabulary,
        context_limit(config, shapes), crossing=decoder,
    )  # fmt: skip


def _first(config: dict[str, Any], *keys: str) -> int | None:
    """The first of these values that is a whole number above 0."""
    found = (config.get(key) for key in keys)
    return next((value for value in found if isinstance(value, int) and value > 0), None)


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
