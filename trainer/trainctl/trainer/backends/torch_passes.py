"""Forward passes of a model on torch: an objective's outputs, the probe's values, and answers to prompts.

In 16 bits, rounding alone moves a real model's log-probabilities by up to 1 nat, which hides a model that differs. So
the probe's products are computed in float32 from the weights as the run holds them, one block of rows at a time; no
second copy of the model is made.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.overrides import TorchFunctionMode
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from trainctl.protocol.batch.memory_estimate import Chunking
from trainctl.protocol.config.quantization import UNPACKED_VALUES
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.backends.passes import SUREST, Array, Decoding, Passes, layer_values
from trainctl.trainer.backends.torch_compile import CompiledLayers, uncompiled
from trainctl.trainer.backends.torch_loss import IGNORED, TorchChunks, cross_entropy
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.model import torch_attention
from trainctl.trainer.model.torch_attention import document_bounds
from trainctl.trainer.objectives.objective import Outputs

_LOW = (torch.bfloat16, torch.float16)


class TorchPasses(Passes):
    def __init__(
        self,
        model: Any,
        device: torch.device | None = None,
        adapter: Lora | None = None,
        compiled: CompiledLayers | None = None,
    ) -> None:
        self.model, self.device = model, device or torch.device("cpu")
        self.adapter, self.compiled = adapter, compiled
        self.attention: str = getattr(getattr(model, "config", None), "_attn_implementation", None) or ""

    def _chunks(self, chunking: Chunking) -> TorchChunks | None:
        return TorchChunks.of(self.model, chunking)

    def outputs(self, batch: Batch) -> "TorchOutputs":
        return TorchOutputs(self, batch)

    def numbers(self, scalars: Sequence[torch.Tensor]) -> list[float]:
        numbers: list[float] = torch.stack([scalar.float() for scalar in scalars]).tolist() if scalars else []
        return numbers

    def on_host(self, array: torch.Tensor) -> Any:
        return array.cpu().numpy()

    def float32(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.float()

    def logits(self, batch: Batch) -> torch.Tensor:
        with self.arguments(batch) as arguments:
            logits_BTV: torch.Tensor = self.model(use_cache=False, **arguments).logits
        return logits_BTV

    def hidden(self, batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        if self.chunks is None:
            return self.logits(batch).flatten(0, 1)[rows], lambda logits: logits
        with self.arguments(batch) as arguments:
            return self.chunks.hidden(**arguments)[rows], self.chunks.logits

    @contextmanager
    def arguments(self, batch: Batch) -> Iterator[dict[str, Any]]:
        """Yield the model's arguments, with what tells it of a pack's documents, and of an encoder's padding; the keys
        of dropout are set on the way."""
        if self.adapter is not None:
            self.adapter.token_keys.value = None if batch.keys is None else self.array(batch.keys, as_index=False)
        inputs_BT = self.array(batch.inputs)
        arguments: dict[str, Any] = {"input_ids": inputs_BT}
        if batch.prompts is not None:
            prompts, lengths = batch.prompts.inputs, batch.prompts.lengths
            mask = self.array((np.arange(prompts.shape[1]) < lengths[:, None]).astype(np.int32))
            arguments = {"input_ids": self.array(prompts), "attention_mask": mask, "decoder_input_ids": inputs_BT}
        if batch.positions is None:
            with torch_attention.documents_per_row("one"):
                yield arguments
            return
        if self.attention == torch_attention.VARLEN:
            arguments |= torch_attention.arguments(document_bounds(batch.positions, batch.lengths), self.device)
        with torch_attention.documents_per_row("several"):
            yield {"position_ids": self.array(batch.positions), **arguments}

    def constant(self, array: torch.Tensor) -> torch.Tensor:
        return array.detach()

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        disabled = nullcontext() if self.adapter is None else self.model.disable_adapter()
        with torch.no_grad(), uncompiled(self.compiled), disabled:
            yield

    def array(self, values: NDArray[Any], *, as_index: bool = True) -> torch.Tensor:
        """Return values on the device. A copy to CUDA doesn't wait for what the device still has to do: the driver
        takes over values in ordinary memory before it returns."""
        tensor = torch.from_numpy(values).to(self.device, non_blocking=self.device.type == "cuda")
        return tensor.long() if as_index and not tensor.is_floating_point() else tensor

    @contextmanager
    def probing(self, flips: int) -> Iterator[list[Array]]:
        from transformers.modeling_layers import GradientCheckpointingLayer

        decoder = self.model.get_decoder() if hasattr(self.model, "get_decoder") else self.model
        layers: list[Array] = []
        mode = Float32Products(flips)

        def embed(module: object, inputs: object, output: torch.Tensor) -> torch.Tensor:
            return mode.flipped(output)

        def watch(module: object, inputs: object, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            layers.append(layer_values(hidden.float().cpu().numpy()))

        with ExitStack() as hooks:
            for module in self.model.modules():
                if isinstance(module, torch.nn.Embedding):
                    hooks.callback(module.register_forward_hook(embed).remove)
            for module in decoder.modules():
                if isinstance(module, GradientCheckpointingLayer):
                    hooks.callback(module.register_forward_hook(watch).remove)
            with mode:
                yield layers

    def generate(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        model = self.model
        inputs = torch.tensor([[*prompt]], device=next(model.parameters()).device)
        library: Any = GenerationConfig
        config = library() if how.settings is None else library.from_model_config({**how.settings})
        config.update(
            max_new_tokens=how.max_tokens,
            max_length=None,
            do_sample=how.temperature > 0,
            temperature=how.temperature or None,
            top_p=how.top_p,
            top_k=config.top_k or 0,
            eos_token_id=sorted(ends) or None,
            pad_token_id=min(ends, default=0),
            decoder_start_token_id=how.decoder_start,
            num_return_sequences=1,
            return_dict_in_generate=False,
            output_attentions=False,
            output_hidden_states=False,
            output_scores=False,
            output_logits=False,
        )
        owner = getattr(model, "get_base_model", lambda: model)()
        own = owner.generation_config
        owner.generation_config = library()  # which stands in for all that isn't set above
        try:
            tokens = model.generate(
                inputs,
                attention_mask=torch.ones_like(inputs),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([_OnToken(on_token)]),
            )
        finally:
            owner.generation_config = own
        return [int(token) for token in tokens[0, 1 if model.config.is_encoder_decoder else len(prompt) :]]


class TorchOutputs(Outputs):
    passes: TorchPasses

    def losses(self, *, every: bool = False, summed: bool = False) -> torch.Tensor:
        passes, batch, logits = self.passes, self.batch, self.computed_logits
        counted_BT, reduction = batch.every_target if every else batch.counted, "sum" if summed else "none"
        targets_BT = passes.array(np.where(counted_BT > 0, batch.targets, IGNORED))
        chunks, targets = passes.chunks, targets_BT.flatten()
        if logits is None and chunks is not None and (size := chunks.chunking.chunk_tokens(targets.numel())):
            with passes.arguments(batch) as arguments:
                losses: torch.Tensor = chunks.chunked_cross_entropy(targets_BT, size, **arguments)
            return losses.sum() if summed else losses.view(targets_BT.shape)
        if logits is None and passes.compiled is not None and passes.compiled.compiles_losses:
            losses = passes.compiled.compiled_cross_entropy(passes.logits(batch).flatten(0, 1), targets, reduction)
        else:  # the logits in the model's data type are freed before the loss is computed
            flat = (passes.logits(batch).float() if logits is None else logits).flatten(0, 1)
            losses = cross_entropy(flat, targets, reduction)
        return losses if summed else losses.view(targets_BT.shape)

    def log_sigmoid(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.logsigmoid(x)

    def log_odds(self, x: torch.Tensor) -> torch.Tensor:
        x = x.clamp(max=SUREST)
        return x - torch.log(-torch.expm1(x))


class Float32Products(TorchFunctionMode):
    """Keeps all that follows from the embeddings in float32. `flips` is applied to the integer view of each linear
    layer's input."""

    def __init__(self, flips: int) -> None:
        super().__init__()
        self._flips = flips

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.linear:
            return self._linear(*args, **kwargs)
        if func in (torch.Tensor.to, torch.Tensor.type_as) and _lowers(args, kwargs):
            return args[0]
        if not func.__name__.endswith("_") and _are_mixed([*args, *kwargs.values()]):  # else it writes to its first
            return func(*map(_float, args), **{name: _float(value) for name, value in kwargs.items()})
        return func(*args, **kwargs)

    def _linear(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:  # noqa: A002
        rows = max(1, UNPACKED_VALUES // weight.shape[-1])
        blocks = (weight,) if weight.dtype == torch.float32 else torch.split(weight, rows)
        x = self.flipped(input)
        parts = [torch.nn.functional.linear(x, block.float()) for block in blocks]
        product = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return product if bias is None else product + bias.float()

    def flipped(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x` in float32, moved by the flips."""
        x = x.float()
        return (x.contiguous().view(torch.int32) ^ self._flips).view(torch.float32) if self._flips else x


def _lowers(args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a conversion of a float32 tensor is to 16 bits."""
    wanted = (*args[1:], *kwargs.values())
    types = [each.dtype if isinstance(each, torch.Tensor) else each for each in wanted]
    return args[0].dtype == torch.float32 and any(each in _LOW for each in types if isinstance(each, torch.dtype))


def _are_mixed(values: Sequence[Any]) -> bool:
    """Return whether there are tensors of float32 and of 16 bits among the values, and in lists among them."""
    flat = [part for each in values for part in (each if isinstance(each, list | tuple) else (each,))]
    types = {part.dtype for part in flat if isinstance(part, torch.Tensor)}
    return torch.float32 in types and not types.isdisjoint(_LOW)


def _float(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_float, value))
    return value.float() if isinstance(value, torch.Tensor) and value.dtype in _LOW else value


class _OnToken(StoppingCriteria):
    """Calls back after each token, and stops nothing. Unlike a streamer, it can be used with beams."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self._call()
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
