"""Cross-entropy on MLX: of whole logits, and over chunks of tokens, so that the logits of a whole micro-batch are never
held at once. `torch_loss.py` is its counterpart, and says how chunks are made. `mlx_passes.MlxOutputs` chooses between
whole and chunked.
"""

import functools
from typing import Any, Literal

import mlx.core as mx
from mlx import nn
from mlx.utils import tree_flatten, tree_unflatten

from trainctl.protocol.batch.memory_estimate import Chunking
from trainctl.protocol.config.model_facts import HEADS

_layers: Any = nn  # whose stubs lack some of them
_EMBEDDING = (_layers.Embedding, _layers.QuantizedEmbedding)


def cross_entropy(logits: Any, targets: Any, reduction: Literal["none", "sum"], counted: Any = None) -> Any:
    """Return cross-entropies in nats ("none") or their "sum", in float32, of logits [..., V] and targets [...], each
    times `counted` where that is passed."""
    return nn.losses.cross_entropy(logits.astype(mx.float32), targets, weights=counted, reduction=reduction)


class MlxChunks:
    """The chunked losses of an mlx-lm model, with or without adapters."""

    def __init__(self, whole: Any, body: Any, tied: str | None, chunking: Chunking) -> None:
        """`tied`: the name of the body's embeddings, if they are the head. The body gets a class that lets hidden
        states through, for as long as the model lives."""
        self._whole, self._body, self._tied, self.chunking = whole, body, tied, chunking
        kind: Any = type(body)
        body.__class__ = _bypassed(kind)

    @classmethod
    def of(cls, model: Any, chunking: Chunking) -> "MlxChunks | None":
        """Return the chunks of a model; None if its head can't be told from its body."""
        body: Any = getattr(model, "model", None)
        if body is None:
            return None
        parameters: Any = tree_flatten(model.parameters())
        has_head = any(name.endswith(HEADS) for name, _ in parameters)
        embeddings = (name for name, child in body.children().items() if isinstance(child, _EMBEDDING))
        tied = None if has_head else next(embeddings, None)
        return cls(model, body, tied, chunking) if has_head or tied else None

    def hidden(self, inputs: Any, caches: Any = None) -> Any:
        """Return the last hidden states, [B T, H]."""
        return self._body(inputs, cache=caches).flatten(0, 1)

    def logits(self, hidden: Any) -> Any:
        """Return the logits [N, V] of hidden states [N, H]."""
        return self._whole(hidden[None])[0]

    def chunked_cross_entropy(self, inputs: Any, targets: Any, chunk_tokens: int, caches: Any = None) -> Any:
        """Return the negative log-probability of each target, [B T] in float32. Each chunk waits for the one before
        it: MLX evaluates what can be evaluated at once."""
        expected, count = targets.flatten(), targets.size
        pairs: Any = tree_flatten(self._head_parameters())
        spans = [slice(start, start + chunk_tokens) for start in range(0, count, chunk_tokens)]

        def chunk_losses(span: slice, part: Any, *head: Any) -> Any:
            self._whole.update(tree_unflatten([(name, array) for (name, _), array in zip(pairs, head, strict=True)]))
            return cross_entropy(self.logits(part), expected[span], "none")

        @mx.custom_function
        def losses(hidden: Any, *head: Any) -> Any:
            parts: list[Any] = []
            for span in spans:
                parts.append(chunk_losses(span, *mx.depends([hidden[span]], parts[-1:]), *head))
            return mx.concatenate(parts)

        @losses.vjp
        def gradients(primals: Any, cotangent: Any, _: Any) -> Any:
            hidden, *head = primals if pairs else [primals]
            parts: list[Any] = []
            sums = [mx.zeros_like(array) for array in head]
            for span in spans:
                [part] = mx.depends([hidden[span]], [*parts[-1:], *sums])
                _, (own, *more) = mx.vjp(functools.partial(chunk_losses, span), [part, *head], [cotangent[span]])
                parts.append(own)
                sums = [total + new for total, new in zip(sums, more, strict=True)]
            return (mx.concatenate(parts), *sums) if pairs else mx.concatenate(parts)

        return losses(self.hidden(inputs, caches), *(array for _, array in pairs))

    def _head_parameters(self) -> Any:
        """Return what the head trains: all outside the body, and the embeddings that are tied to it."""
        outside = {key: child for key, child in self._whole.children().items() if child is not self._body}
        parameters = {key: child.trainable_parameters() for key, child in outside.items()}
        if self._tied is not None:
            parameters["model"] = {self._tied: self._body[self._tied].trainable_parameters()}
        return parameters


@functools.cache
def _bypassed(kind: Any) -> Any:
    """Return a class of bodies that give hidden states as they are, so that the model computes its head alone for
    them."""

    class Bypassed(kind):  # type: ignore[misc]
        def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return inputs if inputs.ndim == 3 else super().__call__(inputs, *args, **kwargs)

    return Bypassed
