"""Attention of transformers' models: the documents of a pack are kept apart by a mask, or by torch's `varlen_attn`.

transformers searches the positions of a batch for several documents per row, and the host waits for the result.
Within `documents_per_row` it skips that search, or doesn't wait for it.

With `[model] attention = "varlen"` each document is computed by itself, unmasked. transformers calls the kernel through
its attention interface, with the documents' bounds as the arguments that it has for FlashAttention. Batches without
packs are computed as by transformers' "sdpa". The kernel is FlashAttention 2 (Dao 2023). Its limits are those in
torch's documentation and source, 2.11 to 2.13.
"""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError

VARLEN: Final = "varlen"
"""The kernel that takes documents' bounds, in run files and in transformers."""
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
_rows: ContextVar[Literal["unknown", "one", "several"]] = ContextVar("documents per row", default="unknown")


@contextmanager
def documents_per_row(rows: Literal["one", "several"]) -> Iterator[None]:
    """Spare models that are called within the search for documents. If a row may have several, one begins wherever a
    position doesn't follow the one before it."""
    token = _rows.set(rows)
    try:
        yield
    finally:
        _rows.reset(token)


def install_masks() -> None:
    """Have transformers ask here first; a version without that function stays as it is."""
    from transformers import masking_utils

    own: Any = masking_utils
    find: Callable[[Any], Any] | None = getattr(own, "find_packed_sequence_indices", None)
    if find is not None and find.__module__ != __name__:
        own.find_packed_sequence_indices = _asked_first(find)


def _asked_first(find: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def indices(positions: Any) -> Any:
        rows = _rows.get()
        if rows == "several":  # [B, T]: the number of each token's document in its row
            return (positions.diff(dim=-1, prepend=positions[:, :1] - 1) != 1).cumsum(-1)
        return None if rows == "one" else find(positions)

    return indices


def document_bounds(positions: NDArray[np.int32], lengths: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return where each document of packs begins if their rows are laid end to end, and the end of the last, from each
    token's position in its document, [B, T], and each row's tokens without padding, [B]. A document begins at each
    row's first token and wherever a position doesn't follow the one before. The padding of a row is one document."""
    columns = np.arange(positions.shape[1])
    begins = np.ones(positions.shape, np.bool_)
    begins[:, 1:] = np.diff(positions, axis=1) != 1
    begins = np.where(columns < lengths[:, None], begins, columns == lengths[:, None])
    return np.append(np.flatnonzero(begins), begins.size).astype(np.int32)


def adopt(model: Any, device: torch.device, dtype: torch.dtype, sequence_length: int, where: str) -> None:
    """Have a model of transformers use it. Raises InvalidInputError if the device, the data type or the model can't."""
    from transformers import AttentionInterface, AttentionMaskInterface

    functions: Any = AttentionInterface
    masks: Any = AttentionMaskInterface
    fault = device_fault(device, dtype)
    if fault is None:
        functions.register(VARLEN, _attend)
        masks.register(VARLEN, _mask)
        model.set_attn_implementation(VARLEN)
        fault = model_fault(model.config, sequence_length)
    if fault is not None:
        raise InvalidInputError(f"{where}: model.attention", f'"{VARLEN}" {fault}; {_INSTEAD}')


def device_fault(device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the kernel can't run on a device."""
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
    """Return why a model with this configuration can't use the kernel for packs of up to `sequence_length` tokens."""
    stated = config.to_dict()  # attributes that differ from layer to layer can't be read one by one
    if config._attn_implementation != VARLEN or stated["is_encoder_decoder"]:
        return "does not support this model: it does not use transformers' attention interface as decoders do"
    size = stated.get("head_dim") or stated.get("hidden_size", 0) // stated.get("num_attention_heads", 1)  # 0: unknown
    if size > _MOST_HEAD or size % _HEAD_STEP:
        return f"needs heads of a multiple of {_HEAD_STEP} up to {_MOST_HEAD}, and this model's have {size}"
    if stated.get("attn_logit_softcapping"):
        return "has no soft cap for attention scores, and this model has one"
    for key in ("sliding_window", "attention_chunk_size"):
        window = stated.get(key)
        if window is not None and window < sequence_length:
            return f"has no attention windows, and this model's {key} is {window}, below data.sequence_length"
    return None


def arguments(bounds: NDArray[np.int32], device: torch.device) -> dict[str, Any]:
    """Return what a model is called with for a batch of packs that has these `document_bounds`."""
    starts = torch.from_numpy(bounds).to(device, non_blocking=device.type == "cuda")
    longest = int(np.diff(bounds).max())
    return {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": longest, "max_length_k": longest}


def _mask(*args: Any, **how: Any) -> Any:
    """Return None for packs, whose bounds the kernel has. Raises RuntimeError for a window that would act."""
    from transformers.masking_utils import sdpa_mask

    if _rows.get() != "several":
        return sdpa_mask(*args, **how)
    window = how.get("local_size")
    if window is not None and window < how["kv_length"]:
        raise RuntimeError(f"an attention window of {window} tokens is not supported")
    return None


def _attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **how: Any,
) -> tuple[torch.Tensor, None]:
    """Return [B, T, heads, size], from queries, keys and values of [B, heads, T, size]; of keys and values there may be
    fewer heads."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    if how.get("cu_seq_lens_q") is None:
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **how)
        return plain
    _check(module, how)
    batch, heads, length, size = query.shape
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (query, key, value))
    attended = _kernel(q, k, v, how["cu_seq_lens_q"], how["max_length_q"], how.get("scaling"))
    return attended.view(batch, length, heads, size), None


def _check(module: Any, how: dict[str, Any]) -> None:
    """Raise RuntimeError for what the kernel would leave out."""
    ignored = [name for name in ("softcap", "s_aux", "position_bias") if how.get(name) is not None]
    ignored += ["dropout"] if how.get("dropout") else []
    if ignored or how.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise RuntimeError(f"attention with {', '.join(ignored) or 'later tokens'} is not supported")


def _kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:
    """Return causal attention, [tokens, heads, size], within each document."""
    from torch.nn.attention.varlen import varlen_attn

    groups, version, how = query.shape[1] // key.shape[1], torch.__version__, {"scale": scale, "window_size": _CAUSAL}
    if version >= _GROUPED_HEADS:  # type: ignore[operator]
        how["enable_gqa"] = groups > 1
    elif groups > 1:
        key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    kernel: Any = varlen_attn  # its arguments differ by version
    attended = kernel(query, key, value, starts, starts, longest, longest, **how)
    assert isinstance(attended, torch.Tensor), "no auxiliary outputs were requested"
    return attended
