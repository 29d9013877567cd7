"""Forward passes of a model on MLX: an objective's outputs, the probe's values, and answers to prompts.

For the probe every product is computed in float32. MLX promotes: embeddings in float32 make all that follows float32,
from the weights as the run holds them. Layers get another class for a while, as modules have no hooks.
"""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import mlx.core as mx
import numpy as np
from mlx import nn
from numpy.typing import NDArray

from trainctl.protocol.batch.memory_estimate import Chunking
from trainctl.trainer.adapters import mlx_lora
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.backends.mlx_loss import MlxChunks, cross_entropy
from trainctl.trainer.backends.passes import SUREST, Array, Decoding, Passes, layer_values
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.model.mlx_model import DocumentMask
from trainctl.trainer.objectives.objective import Outputs

_layers: Any = nn  # whose stubs lack some of them
_LINEAR = (_layers.Linear, _layers.QuantizedLinear)
_EMBEDDING = (_layers.Embedding, _layers.QuantizedEmbedding)


class MlxPasses(Passes):
    def __init__(self, model: Any, adapter: Lora | None = None) -> None:
        self.model, self.adapter = model, adapter

    def _chunks(self, chunking: Chunking) -> MlxChunks | None:
        return MlxChunks.of(self.model, chunking)

    def outputs(self, batch: Batch) -> "MlxOutputs":
        return MlxOutputs(self, batch)

    def numbers(self, scalars: Sequence[Any]) -> list[float]:
        mx.eval(scalars)
        return [float(scalar.item()) for scalar in scalars]

    def on_host(self, array: Any) -> Any:
        return np.array(array)

    def array(self, values: NDArray[Any]) -> Any:
        return mx.array(values)

    def float32(self, logits: Any) -> Any:
        return logits.astype(mx.float32)

    def logits(self, batch: Batch) -> Any:
        return self.model(mx.array(batch.inputs), cache=self.caches(batch))

    def hidden(self, batch: Batch, rows: Any) -> tuple[Any, Callable[[Any], Any]]:
        if self.chunks is None:
            logits = self.logits(batch).flatten(0, 1)[rows]
            mx.eval(logits)  # while the adapter is as it is
            return logits, lambda values: values
        hidden = self.chunks.hidden(mx.array(batch.inputs), self.caches(batch))[rows]
        mx.eval(hidden)
        return hidden, self.chunks.logits

    def caches(self, batch: Batch) -> list[DocumentMask] | None:
        """Return what keeps a pack's documents apart; the keys of dropout are set on the way."""
        if self.adapter is not None:
            self.adapter.token_keys.value = None if batch.keys is None else mx.array(batch.keys)
        if batch.positions is None:
            return None
        return [DocumentMask(mx.array(batch.positions), self.model)] * len(self.model.layers)

    def constant(self, array: Any) -> Any:
        return mx.stop_gradient(array)

    def without_adapter(self) -> AbstractContextManager[object]:
        return nullcontext() if self.adapter is None else mlx_lora.disabled(self.model, self.adapter)

    @contextmanager
    def probing(self, flips: int) -> Iterator[list[Array]]:
        layers: list[Array] = []
        changed: list[tuple[Any, type]] = []
        try:
            for module in self.model.modules():
                kind: Any = module.__class__
                if isinstance(module, _LINEAR):
                    new = _probed_linear(kind, flips)
                elif isinstance(module, _EMBEDDING):
                    new = _probed_embedding(kind, flips)
                elif any(module is layer for layer in getattr(self.model, "layers", [])):
                    new = _watched(kind, layers)
                else:
                    continue
                changed.append((module, kind))
                module.__class__ = new
            yield layers
        finally:
            for module, kind in reversed(changed):
                module.__class__ = kind

    def generate(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        from mlx_lm.generate import generate_step
        from mlx_lm.sample_utils import make_sampler

        sampler = make_sampler(temp=how.temperature, top_p=how.top_p if how.top_p < 1 else 0.0)
        tokens: list[int] = []
        for token, _ in generate_step(
            mx.array([*prompt]),
            self.model,
            max_tokens=how.max_tokens,
            sampler=sampler,
            prompt_progress_callback=lambda done, whole: on_token(),
        ):
            tokens.append(int(token))
            on_token()
            if tokens[-1] in ends:
                break
        return tokens


class MlxOutputs(Outputs):
    passes: MlxPasses

    def losses(self, *, every: bool = False, summed: bool = False) -> Any:
        passes, batch, logits = self.passes, self.batch, self.computed_logits
        chunks, targets_BT = passes.chunks, mx.array(batch.targets)
        counted_BT = mx.array(batch.every_target if every else batch.counted)
        if logits is None and chunks is not None and (size := chunks.chunking.chunk_tokens(targets_BT.size)):
            inputs_BT, caches = mx.array(batch.inputs), passes.caches(batch)
            losses = chunks.chunked_cross_entropy(inputs_BT, targets_BT, size, caches)
            losses = losses.reshape(targets_BT.shape) * counted_BT
            return losses.sum() if summed else losses
        logits_BTV = passes.logits(batch) if logits is None else logits
        return cross_entropy(logits_BTV, targets_BT, "sum" if summed else "none", counted_BT)

    def log_sigmoid(self, x: Any) -> Any:
        return -mx.logaddexp(mx.array(0.0), -x)

    def log_odds(self, x: Any) -> Any:
        x = mx.minimum(x, SUREST)
        return x - mx.log(-mx.expm1(x))


def _flipped(x: Any, flips: int) -> Any:
    x = x.astype(mx.float32)
    return mx.view(mx.view(x, mx.uint32) ^ flips, mx.float32) if flips else x


@functools.cache
def _probed_linear(kind: Any, flips: int) -> Any:
    class Probed(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            return super().__call__(_flipped(x, flips))

    return Probed


@functools.cache
def _probed_embedding(kind: Any, flips: int) -> Any:
    class Probed(kind):  # type: ignore[misc]
        def __call__(self, x: Any) -> Any:
            scale = getattr(self, "embedding_scale", None)
            rows = super().__call__(x) if scale is None else self.rows(x).astype(mx.float32) * scale
            return _flipped(rows, flips)

        def as_linear(self, x: Any) -> Any:
            return super().as_linear(_flipped(x, flips))

    return Probed


def _watched(kind: Any, layers: list[Array]) -> Any:
    class Probed(kind):  # type: ignore[misc]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            output = super().__call__(*args, **kwargs)
            hidden = output[0] if isinstance(output, tuple) else output
            layers.append(layer_values(np.array(hidden.astype(mx.float32))))
            return output

    return Probed
