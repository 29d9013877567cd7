"""Cross-entropy on torch: of whole logits, and over chunks of tokens, so that the logits of a whole micro-batch are
never held at once.

For chunks, the body of the model gives the last hidden state of each token. Its head, with all that the library's model
does after the body (tied embeddings, soft-capping, scaling), gives the logits of one chunk; backward computes them
again. Losses differ from those of the whole by rounding alone. `torch_passes.TorchOutputs` chooses between whole,
chunked and compiled (torch_compile.py). `mlx_loss.py` is its counterpart.
"""

from typing import Any, Final

import torch
from torch.utils.checkpoint import checkpoint

from trainctl.protocol.batch.memory_estimate import Chunking

IGNORED: Final = -100
"""Target of a token that doesn't count."""


def cross_entropy(logits_NV: torch.Tensor, targets_N: torch.Tensor, reduction: str) -> torch.Tensor:
    """Return cross-entropies [N] in nats ("none") or their "sum", in float32; 0 for `IGNORED` targets."""
    return torch.nn.functional.cross_entropy(logits_NV.float(), targets_N, ignore_index=IGNORED, reduction=reduction)


class TorchChunks:
    """The chunked losses of a transformers model, with or without adapters."""

    def __init__(self, whole: Any, chunking: Chunking) -> None:
        self._whole, self._body, self.chunking = whole, whole.base_model, chunking
        self._output: Any = None  # the type of what the body gives, which some heads look at

    @classmethod
    def of(cls, model: Any, chunking: Chunking) -> "TorchChunks | None":
        """Return the chunks of a model; None if its head can't be told from its body."""
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        is_possible = whole.base_model is not whole and not whole.config.is_encoder_decoder
        return cls(whole, chunking) if is_possible else None

    def hidden(self, **arguments: Any) -> Any:
        """Return the last hidden states, [B T, H]."""
        output = self._body(use_cache=False, **arguments)
        self._output = type(output)
        return output.last_hidden_state.flatten(0, 1)

    def chunked_cross_entropy(self, targets: Any, chunk_tokens: int, **arguments: Any) -> Any:
        """Return the negative log-probability of each target, [B T] in float32, 0 for those that are `IGNORED`."""
        hidden = self.hidden(**arguments)

        def chunk_losses(part: Any, expected: Any) -> Any:
            return cross_entropy(self.logits(part).float(), expected, "none")

        chunks = zip(hidden.split(chunk_tokens), targets.flatten().split(chunk_tokens), strict=True)
        return torch.cat(
            [checkpoint(chunk_losses, *pair, use_reentrant=False, preserve_rng_state=False) for pair in chunks]
        )

    def logits(self, hidden: Any) -> Any:
        """Return the logits [N, V] of `hidden` states [N, H], by the library's own forward pass with a body that gives
        them in its own type of output."""
        self._body.forward = lambda *_, **__: self._output(last_hidden_state=hidden[None])
        try:
            return self._whole(inputs_embeds=hidden[None], use_cache=False).logits[0]
        finally:
            del self._body.forward
