"""Forward passes of a model, and what they give: an objective's outputs, answers to prompts, and the probe's values."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.batch.memory_estimate import Chunking
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.data.batch import Batch, Tokens
from trainctl.trainer.objectives.objective import Outputs

Array = NDArray[np.float32]
SUREST: Final = -1e-7
"""Log-probability above which the odds of an answer no longer grow: those of one that is certain are infinite."""


@dataclass(frozen=True)
class Decoding:
    """The way in which tokens are chosen."""

    max_tokens: int
    temperature: float  # 0: always the likeliest token
    top_p: float
    seed: int
    settings: Mapping[str, Any] | None = None  # of generation_config.json, where they apply too; torch only
    decoder_start: int | None = None  # token that the decoder of an encoder-decoder model begins with


class Passes(ABC):
    """Forward passes of one model, with its adapter or without."""

    model: Any  # with `train()` and `eval()`
    adapter: Lora | None
    chunks: Any = None  # what computes losses of some tokens at a time; None where the model doesn't allow it

    def chunk_losses(self, chunking: Chunking, where: str) -> None:
        """Compute the losses of some tokens at a time from here on. Raises InvalidInputError if the model doesn't allow
        it, and it is asked for."""
        self.chunks = self._chunks(chunking)
        if chunking.mode == "on" and self.chunks is None:
            problem = 'this model does not support "on"; use "auto" or "off"'
            raise InvalidInputError(f"{where}: model.chunked_loss", problem)

    @abstractmethod
    def _chunks(self, chunking: Chunking) -> Any:
        """Return what computes losses in chunks; None for a model whose head can't be told from its body."""

    @abstractmethod
    def outputs(self, batch: Batch) -> Outputs:
        """Return what an objective reads of a batch."""

    @abstractmethod
    def array(self, values: NDArray[Any]) -> Any:
        """Return values on the device; integers as those of an index."""

    @abstractmethod
    def float32(self, logits: Any) -> Any:
        """Return logits in float32."""

    @abstractmethod
    def logits(self, batch: Batch) -> Any:
        """Return [B, T, V], in the model's data type."""

    @abstractmethod
    def hidden(self, batch: Batch, rows: Any) -> tuple[Any, Callable[[Any], Any]]:
        """Return the last hidden states of some of the batch's targets and what makes logits of them; without
        chunks, the logits."""

    @abstractmethod
    def numbers(self, scalars: Sequence[Any]) -> list[float]:
        """Return the library's arrays of one element as numbers; waits for the device."""

    @abstractmethod
    def on_host(self, array: Any) -> Any:
        """Return an array of the library's as one of NumPy's."""

    @abstractmethod
    def constant(self, array: Any) -> Any:
        """Return an array through which no gradient goes."""

    @abstractmethod
    def without_adapter(self) -> AbstractContextManager[object]:
        """Have the model compute as if it had no adapter, for its reference's values."""

    @abstractmethod
    def probing(self, flips: int) -> AbstractContextManager[list[Array]]:
        """Have the model compute in float32, `flips` applied to the integer view of each linear layer's input. The list
        gets each decoder layer's values, [B, T]."""

    @abstractmethod
    def generate(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        """Return an answer by the library's own random numbers, of a model in evaluation mode."""


@dataclass(frozen=True)
class ProbePass:
    """One forward pass of the probe."""

    log_probabilities: Array  # [targets] of the counted targets, nats
    layers: Array  # [layers, targets], by `layer_values`

    @classmethod
    def of(cls, batch: Batch, pieces: Iterable[tuple[Array, Tokens]], layers: Sequence[Array]) -> "ProbePass":
        """Put a pass together from pieces of the counted targets' logits [N, V] with the targets [N], and the values
        [B, T] of each layer, of which some models have none. The logarithms are taken in float64: libraries that sum
        50,000 exponentials in float32 differ by 2e-4."""
        log_probabilities = list[np.float32]()
        for logits_NV, targets_N in pieces:
            for row, target in zip(logits_NV, targets_N, strict=True):
                wide = row.astype(np.float64) - row.max()
                log_probabilities.append(np.float32(wide[target] - np.log(np.exp(wide).sum())))
        counted = batch.counted > 0
        empty = np.empty((0, int(counted.sum())), np.float32)
        values = np.stack([layer[counted] for layer in layers]) if layers else empty
        return cls(np.array(log_probabilities, np.float32), values)


def layer_values(hidden_BTH: Array) -> Array:
    """Return one value per token [B, T] of hidden states: their sum, each channel with a fixed weight in (-1, 1)."""
    weights = (np.arange(1, hidden_BTH.shape[-1] + 1, dtype=np.uint64) * 0x9E3779B1 & 0xFFFFFFFF) / 2.0**31 - 1
    return (hidden_BTH @ weights).astype(np.float32)
