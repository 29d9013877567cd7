"""What a model on torch gives for a batch: logits, losses, and the head's input for a part of its tokens."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.attention import torch_masks, torch_varlen
from trainctl.trainer.attention.document_bounds import VARLEN, document_bounds
from trainctl.trainer.backends.base import NO_REFERENCE, SUREST, VOCABULARY_FLOATS, BatchOutputs, Functions
from trainctl.trainer.backends.chunked_loss import TorchChunks
from trainctl.trainer.backends.torch_compile import IGNORED, CompiledLayers, token_losses, uncompiled
from trainctl.trainer.data.batch import Batch, Tokens
from trainctl.trainer.objectives.objective import Vocabulary


class TorchOutputs:
    """Of one model, with its adapter or without."""

    def __init__(self, model: Any, device: torch.device, adapter: Lora | None) -> None:
        self._model, self._device, self._adapter = model, device, adapter
        self.chunks: TorchChunks | None = None
        self.compiled: CompiledLayers | None = None
        self.attention: str = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""

    def __call__(self, batch: Batch) -> BatchOutputs:
        """What an objective reads of a batch; computed when it is read."""
        return BatchOutputs(
            functools.partial(self._logits, batch), functools.partial(self.losses, batch),
            lambda: self._moved(batch.counted),
            functools.partial(self._reference_losses, batch), functools.partial(self._vocabulary, batch), _FUNCTIONS,
        )  # fmt: skip

    @torch.no_grad()
    def _reference_losses(self, batch: Batch) -> torch.Tensor:
        """[B, L], as computed before or with the adapter off."""
        if batch.reference is not None:
            return -self._moved(batch.reference)
        assert self._adapter is not None, NO_REFERENCE
        with uncompiled(self.compiled), self.without_adapter():
            return self.losses(batch, None, "none")

    @torch.no_grad()
    def _vocabulary(self, batch: Batch, *, with_reference: bool) -> Iterator[Vocabulary]:
        """Of counted targets, as many at a time as `VOCABULARY_FLOATS` allows."""
        counted = self._moved(np.flatnonzero(batch.counted))
        targets = self._integers(batch.targets).flatten()[counted]
        own, head = self._before_head(batch, counted)
        other = None
        if with_reference and self._adapter is not None:
            with self._model.disable_adapter():
                other, _ = self._before_head(batch, counted)
        size = max(1, VOCABULARY_FLOATS // head(own[:1]).shape[-1])
        for start in range(0, len(counted), size):
            part = slice(start, start + size)
            logits, reference = head(own[part]).float(), None
            if other is not None:
                with self._model.disable_adapter():
                    reference = head(other[part]).float()
            yield Vocabulary(logits, reference, targets[part])

    def _before_head(
        self, batch: Batch, rows: torch.Tensor
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """The last hidden states of some of the batch's targets and what makes logits of them; of a model whose head
        can't be told from its body, the logits."""
        with self._documents(batch) as documents:
            inputs = self._inputs(batch)
            if self.chunks is not None and self.chunks.is_possible:
                return self.chunks.hidden(inputs["input_ids"], **documents)[rows], self.chunks.logits
            logits: torch.Tensor = self._model(**inputs, use_cache=False, **documents).logits
        return logits.flatten(0, 1)[rows], lambda found: found

    def without_adapter(self) -> AbstractContextManager[object]:
        return nullcontext() if self._adapter is None else self._model.disable_adapter()

    def _logits(self, batch: Batch) -> torch.Tensor:
        return self._own_logits(batch).float()

    def _own_logits(self, batch: Batch) -> torch.Tensor:
        """[B, L, V], in the model's data type."""
        with self._documents(batch) as documents:
            logits: torch.Tensor = self._model(**self._inputs(batch), use_cache=False, **documents).logits
        return logits

    def _inputs(self, batch: Batch) -> dict[str, torch.Tensor]:
        """The model's arguments; for an encoder also the mask of its padding."""
        inputs = self._integers(batch.inputs)
        if batch.prompts is None:
            return {"input_ids": inputs}
        prompts, lengths = batch.prompts.inputs, batch.prompts.lengths
        given = self._integers((np.arange(prompts.shape[1]) < lengths[:, None]).astype(np.int32))
        return {"input_ids": self._integers(prompts), "attention_mask": given, "decoder_input_ids": inputs}

    def losses(self, batch: Batch, logits: torch.Tensor | None, reduction: str, *, every: bool = False) -> torch.Tensor:
        """[B, L] losses ("none") or their sum ("sum"), from logits where there are some already; of counted targets, or
        of `every` one."""
        wanted = batch.every_target if every else batch.counted
        targets = self._integers(np.where(wanted > 0, batch.targets, IGNORED))
        if logits is None and self.chunks is not None and (size := self.chunks.chunk_tokens(targets.numel())):
            with self._documents(batch) as documents:
                inputs = self._integers(batch.inputs)
                losses: torch.Tensor = self.chunks.token_losses(inputs, targets, size, IGNORED, **documents)
            return losses.sum() if reduction == "sum" else losses.view(targets.shape)
        if logits is None and self.compiled is not None and self.compiled.compiles_losses:
            losses = self.compiled.token_losses(self._own_logits(batch).flatten(0, 1), targets.flatten(), reduction)
        else:  # the logits in the model's data type are freed before the loss is computed
            flat = (self._logits(batch) if logits is None else logits).flatten(0, 1)
            losses = token_losses(flat, targets.flatten(), reduction)
        return losses if reduction == "sum" else losses.view(targets.shape)

    @contextmanager
    def _documents(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """What tells the model of a pack's documents; the keys of dropout are set on the way."""
        if self._adapter is not None:
            keys = batch.keys
            self._adapter.token_keys.value = None if keys is None else self._moved(keys)
        if batch.positions is not None:
            with torch_masks.documents_by_position():
                yield {"position_ids": self._integers(batch.positions), **self._bounds(batch)}
            return
        with torch_masks.one_document_per_row():
            yield {}

    def _bounds(self, batch: Batch) -> dict[str, Any]:
        """Of a pack's documents, for a kernel that takes them."""
        if self.attention != VARLEN or batch.positions is None:
            return {}
        return torch_varlen.arguments(document_bounds(batch.positions, batch.lengths), self._device)

    def _moved(self, values: NDArray[Any]) -> torch.Tensor:
        """On the device. A copy to CUDA doesn't wait for what the device still has to do: the driver takes over values
        in ordinary memory before it returns."""
        return torch.from_numpy(values).to(self._device, non_blocking=self._device.type == "cuda")

    def _integers(self, values: Tokens) -> torch.Tensor:
        return self._moved(values).long()


def _log_odds(x: torch.Tensor) -> torch.Tensor:
    x = x.clamp(max=SUREST)
    return x - torch.log(-torch.expm1(x))


_FUNCTIONS = Functions(torch.nn.functional.logsigmoid, _log_odds)
