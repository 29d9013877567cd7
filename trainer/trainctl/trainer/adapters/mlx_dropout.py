"""Dropout of adapters on MLX, in the place of mlx.nn's."""

from typing import Any

import mlx.core as mx
from mlx import nn

from trainctl.trainer.adapters import dropout
from trainctl.trainer.adapters.lora import Lora


class Dropout(nn.Module):  # type: ignore[misc, name-defined]
    """Drops inputs of one adapter while training."""

    def __init__(self, lora: Lora, place: int, width: int) -> None:
        super().__init__()
        self._tokens, self._rate = lora.token_keys, lora.table.dropout
        self._channels = mx.array(dropout.channel_keys(place, width))

    def __call__(self, x: Any) -> Any:
        if not self.training or self._tokens.value is None:
            return x
        kept = dropout.kept(self._tokens.value, self._channels, dropout.threshold(self._rate))
        return mx.where(kept, x.astype(mx.float32) * (1 / (1 - self._rate)), 0)
