"""Attention by torch's `varlen_attn` (`[model] attention = "varlen"`): each document of a pack by itself, unmasked.

transformers calls it through its attention interface. It gets the documents' bounds as the arguments that transformers
has for FlashAttention. Batches without packs are computed as by transformers' "sdpa".

The kernel is FlashAttention 2 (Dao 2023). Its limits are those of torch's documentation and source, 2.11 to 2.13.
"""

import importlib.util
from collections.abc import Mapping
from typing import Any, Final

import torch

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.attention import torch_masks
from trainctl.trainer.attention.document_bounds import VARLEN, DocumentBounds

_TORCH: Final = (2, 11)
"""The first version with `scale` and `window_size`."""
_GROUPED_HEADS: Final = (2, 12)
"""The first version whose kernel takes fewer key and value heads than query heads."""
_CAPABILITY: Final = (8, 0)
"""Least compute capability of FlashAttention 2: Ampere."""
_DTYPES: Final = (torch.float16, torch.bfloat16)
_MOST_HEAD: Final = 256
"""Most numbers in a head's vector, a multiple of `_HEAD_STEP`."""
_HEAD_STEP: Final = 8
_CAUSAL: Final = (-1, 0)
"""The window of all tokens before a token, and itself."""
_INSTEAD: Final = 'set attention = "auto"'


def adopt(model: Any, device: torch.device, dtype: torch.dtype, sequence_length: int, where: str) -> None:
    """Have a model of transformers use it. Raises InvalidInputError if the device, the data type or the model can't."""
    fault = device_fault(device, dtype)
    if fault is None:
        _register()
        model.set_attn_implementation(VARLEN)
        fault = model_fault(model.config, sequence_length)
    if fault is not None:
        raise InvalidInputError(f"{where}: model.attention", f'"{VARLEN}" {fault}; {_INSTEAD}')


def device_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why the kernel can't run on a device."""
    if device.type != "cuda" or torch.version.hip is not None:
        return f"needs an NVIDIA GPU, and this rank's device is {device}"
    installed: Any = torch.__version__
    if installed < _TORCH or importlib.util.find_spec("torch.nn.attention.varlen") is None:
        return f"needs torch {_TORCH[0]}.{_TORCH[1]} or newer, and {installed} is installed"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        name = torch.cuda.get_device_name(device)
        return f"needs an NVIDIA GPU of the Ampere generation or newer, and this rank's device is {name}"
    return None if dtype in _DTYPES else "computes in 16 bits, and model.dtype resolved to float32"


def model_fault(config: Any, sequence_length: int) -> str | None:
    """Why a model with this configuration can't use the kernel for packs of up to `sequence_length` tokens."""
    stated = config.to_dict()  # attributes that differ from layer to layer can't be read one by one
    if config._attn_implementation != VARLEN or stated["is_encoder_decoder"]:
        return "does not support this model: it does not use transformers' attention interface as decoders do"
    size = _head_size(stated)
    if size > _MOST_HEAD or size % _HEAD_STEP:
        return f"needs heads of a multiple of {_HEAD_STEP} up to {_MOST_HEAD}, and this model's have {size}"
    if stated.get("attn_logit_softcapping"):
        return "has no soft cap for attention scores, and this model has one"
    for key in ("sliding_window", "attention_chunk_size"):
        window = stated.get(key)
        if window is not None and window < sequence_length:
            return f"has no attention windows, and this model's {key} is {window}, below data.sequence_length"
    return None


def _head_size(stated: Mapping[str, Any]) -> int:
    """0 if the configuration doesn't give it."""
    size: int = stated.get("head_dim") or stated.get("hidden_size", 0) // stated.get("num_attention_heads", 1)
    return size


def arguments(bounds: DocumentBounds, device: torch.device) -> dict[str, Any]:
    """What a model is called with for a batch of packs."""
    starts = torch.from_numpy(bounds.starts).to(device, non_blocking=device.type == "cuda")
    return {
        "cu_seq_lens_q": starts, "cu_seq_lens_k": starts,
        "max_length_q": bounds.longest, "max_length_k": bounds.longest,
    }  # fmt: skip


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    functions: Any = AttentionInterface
    masks: Any = AttentionMaskInterface
    functions.register(VARLEN, _attend)
    masks.register(VARLEN, _mask)


def _mask(*args: Any, **how: Any) -> Any:
    """None for packs, whose bounds the kernel has. Raises RuntimeError for a window that would act."""
    from transformers.masking_utils import sdpa_mask

    if not torch_masks.has_several_documents():
        return sdpa_mask(*args, **how)
    window = how.get("local_size")
    if window is not None and window < how["kv_length"]:
        raise RuntimeError(f"an attention window of {window} tokens is not supported")
    return None


def _attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """[B, L, heads, size], from queries, keys and values of [B, heads, L, size]; of keys and values there may be fewer
    heads."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if how.get("cu_seq_lens_q") is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        return plain
    _check(module, how)
    batch, heads, length, size = query.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    found = _kernel(q, k, v, how["cu_seq_lens_q"], how["max_length_q"], how.get("scaling"))
    return found.view(batch, length, heads, size), None


def _check(module: Any, how: dict[str, Any]) -> None:
    """Raises RuntimeError for what the kernel would leave out."""
    ignored = [name for name in ("softcap", "s_aux", "position_bias") if how.get(name) is not None]
    ignored += ["dropout"] if how.get("dropout") else []
    if ignored or how.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise RuntimeError(f"attention with {', '.join(ignored) or 'later tokens'} is not supported")


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int,
    scale: float | None,
) -> torch.Tensor:  # fmt: skip
    """[tokens, heads, size]: causal attention within each document."""
    from torch.nn.attention.varlen import varlen_attn

    groups, version, how = query.shape[1] // key.shape[1], torch.__version__, {"scale": scale, "window_size": _CAUSAL}
    if version >= _GROUPED_HEADS:  # type: ignore[operator]
        how["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    kernel: Any = varlen_attn  # its arguments differ by version
    found = kernel(query, key, value, starts, starts, longest, longest, **how)
    assert isinstance(found, torch.Tensor), "no auxiliary outputs were requested"
    return found
