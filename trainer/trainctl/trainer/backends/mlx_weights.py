"""Trained weights on MLX."""

from collections.abc import Mapping
from typing import Any

Arrays = dict[str, Any]


class MlxWeights:
    """Trained parameters by their stored names, as the model computes with them, and their masters: float32 values that
    the optimizer updates. A parameter in 16 bits has one beside it; another is its own."""

    def __init__(self, weights: Mapping[str, Any], dtype: Any | None) -> None:
        """`dtype`: the weights, float32 until now, become it; None: they stay as they are."""
        self._dtype = dtype
        self.computed = {name: array if dtype is None else array.astype(dtype) for name, array in weights.items()}
        self.masters = self.computed if dtype is None else dict(weights)

    @property
    def kept_bytes(self) -> int:
        """Bytes that masters take beside the model's parameters."""
        return 0 if self.masters is self.computed else sum(array.nbytes for array in self.masters.values())

    def store(self, name: str, values: Any) -> None:
        """Take over the master's values of a parameter."""
        self.masters[name] = values.astype(self.masters[name].dtype)
        if self.masters is not self.computed:
            self.computed[name] = values.astype(self._dtype)
