"""Document masks on MLX, in the place of mlx-lm's key-value cache: models ask their cache for the attention mask."""

from typing import Any

import mlx.core as mx
from mlx_lm.models.base import create_causal_mask


class DocumentMask:
    """A cache that keeps nothing: tokens see those before them in their own document. Positions of rotary embeddings
    run through, as only their differences matter."""

    offset = 0

    def __init__(self, positions: Any, model: Any) -> None:
        """Of each token in its document, [B, L]."""
        starts = mx.arange(positions.shape[1]) - positions
        together = starts[:, None, :, None] == starts[:, None, None, :]
        self._together = together[:, None] if _groups_heads(model) else together

    def update_and_fetch(self, keys: Any, values: Any) -> tuple[Any, Any]:
        return keys, values

    def make_mask(self, length: int, window_size: int | None = None, **_: Any) -> Any:
        """[B, 1, L, L], or [B, 1, 1, L, L] where heads are grouped; true where a token sees another."""
        return self._together & create_causal_mask(length, window_size=window_size)


def _groups_heads(model: Any) -> bool:
    """Whether scores have an axis for key heads and one for the query heads of each, as in mlx-lm's Gemma 2."""
    return bool(model.model_type == "gemma2" and model.layers[0].self_attn.repeats > 1)
