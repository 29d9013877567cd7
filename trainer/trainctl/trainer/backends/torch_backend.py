"""The backend on PyTorch: CPU, CUDA and Apple's MPS, for any causal or encoder-decoder model that transformers loads.

On CUDA the host runs ahead of the device by at most one micro-batch, and phases are timed by events in the device's
queue. On MPS a pass ends in a wait for the device; on a CPU work is done when a call returns. Weights and moments are
written to in place.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import check_installed
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters import torch_lora
from trainctl.trainer.backends.backend import ADAMW_SLOTS, Backend, BackendName, MakePhase, SlotName, TrainingRecipe
from trainctl.trainer.backends.memory import MemoryByPart
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.backends.torch_adamw import AdamW, TorchWeights, accumulate, adamw
from trainctl.trainer.backends.torch_compile import CompiledLayers, check_graphs, uncompiled
from trainctl.trainer.backends.torch_device import (
    choose_device,
    choose_kernels,
    limit_memory,
    open_device,
    warn_of_slow_type,
)
from trainctl.trainer.backends.torch_passes import TorchOutputs, TorchPasses
from trainctl.trainer.common.libraries import versions_in_use
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.model import torch_attention
from trainctl.trainer.model.torch_model import Nf4, checkpoint_layers, read_model

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class TorchBackend(Backend):
    """`model` comes in float32; with an adapter attached, its own weights frozen and in `dtype`; without an optimizer,
    all in `dtype`."""

    name: BackendName = "torch"
    out_of_memory_words = (
        "out of memory",
        "can't allocate memory",
        "not enough memory",
        "failed to allocate",
        "bad allocation",
        "invalid buffer size",  # of Metal, above its largest buffer
        "status_alloc_failed",  # of cuBLAS and its like, as they make their own buffers
    )
    passes: TorchPasses
    _accumulators: list[torch.Tensor] | None  # None: zeros

    def __init__(
        self,
        model: torch.nn.Module,
        recipe: TrainingRecipe,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        compiled: CompiledLayers | None = None,
    ) -> None:
        """`compiled`: its layers, if they are."""
        self.recipe, self._dtype = recipe, dtype
        self._torch_device = device or torch.device("cpu")
        self._on_cuda = self._torch_device.type == "cuda"
        self.device = open_device(self._torch_device, recipe.limit_bytes)
        self._model = model.to(self._torch_device).train()
        self.passes = TorchPasses(self._model, self._torch_device, recipe.adapter, compiled)
        self._compiled = compiled
        if compiled is not None:
            self.compile_meter = compiled.meter
        named = sorted((torch_lora.stored_name(name), p) for name, p in model.named_parameters() if p.requires_grad)
        self.shapes = {name: tuple(p.shape) for name, p in named}
        self._parameters = [p for _, p in named]
        # buffers (rotary frequencies) stay float32
        self._weights = TorchWeights(self._parameters, dtype if recipe.trains_all_weights else None)
        self._optimizer = None if recipe.optimizer is None else adamw(self._weights, recipe.optimizer)
        self.slots = () if recipe.optimizer is None else ADAMW_SLOTS
        self.memory_by_part = self._memory_by_part()
        self.clear()

    @classmethod
    def open(cls, config: RunFile, node: NodeTable, recipe: TrainingRecipe, where: str) -> "TorchBackend":
        if node.rank_threads:
            torch.set_num_threads(node.rank_threads)
        device, dtype = choose_device(node.device, where), _DTYPES[config.model.computed]
        if recipe.optimizer is not None and recipe.optimizer.kind != "adamw":
            check_installed("bitsandbytes", "bitsandbytes", f"{where}: optimizer.kind", repr(recipe.optimizer.kind))
        if recipe.adapter is not None and recipe.optimizer is not None:
            check_graphs(config.model.compile, device, where)
        choose_kernels(device, node, tf32=config.model.tf32)
        warn_of_slow_type(device, config.model.computed)
        torch.manual_seed(config.run.seed)
        held, stored = torch.float32 if recipe.trains_all_weights else dtype, config.model.init == "pretrained"
        computed = _DTYPES[config.model.compute_dtype or config.model.computed]
        packing = Nf4(device, computed, config.model.double_quantization) if config.model.base == "nf4" else None
        model = read_model(Path(config.model.path), where, held, with_weights=stored, packing=packing)
        if config.model.attention == torch_attention.VARLEN:
            torch_attention.adopt(model, device, dtype, config.data.sequence_length, where)
        if recipe.limit_bytes:
            limit_memory(device, recipe.limit_bytes)
        if recipe.adapter is not None:
            model = torch_lora.attach(model.to(device), recipe.adapter)
        checkpoint_layers(model, config.model.gradient_checkpointing, where)
        compiled, mode = None, config.model.compile
        if mode != "off" and recipe.optimizer is not None:
            compiled = CompiledLayers(model, mode, device, config.data, where)
        return cls(model, recipe, dtype=dtype, device=device, compiled=compiled)

    @property
    def compute(self) -> Compute:
        dtype, on_cuda = str(self._dtype).removeprefix("torch."), self._on_cuda
        return Compute(
            dtype,
            torch.backends.cuda.matmul.allow_tf32 if on_cuda else None,
            compile="off" if self._compiled is None else self._compiled.mode,
            attention=self.passes.attention,
            weights=self.recipe.weights_in(dtype),
            deterministic=torch.are_deterministic_algorithms_enabled() if on_cuda else None,
            cudnn_benchmark=torch.backends.cudnn.benchmark if on_cuda else None,
            update=self._optimizer.library if on_cuda and self._optimizer is not None else "",
            versions=versions_in_use(self.device.name),
        )

    # ------------------------------------------------------------ a step

    def _pass(
        self,
        batch: Batch,
        scales: Mapping[str, float],
        adding: AbstractContextManager[object] | None,
        phase: MakePhase,
    ) -> None:
        with phase("forward"):
            batch = batch if self._compiled is None else self._compiled.prepared(batch)
            sums = self.recipe.objective.sums(TorchOutputs(self.passes, batch))
            loss = functools.reduce(torch.add, [sums.losses[name] * scale for name, scale in scales.items()])
            numbers = [number.detach() for number in self.recipe.objective.numbers(sums)]
            del sums
            self.device.end_pass(backward=False)
        with phase("backward"):
            gradients = [*torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)]
            del loss
            self.device.end_pass(backward=True)
            if adding is not None:
                with adding:
                    if self._accumulators is None:
                        keeps_graphs = self._compiled is not None and self._compiled.keeps_graphs
                        self._accumulators = widened(gradients, are_overwritten=keeps_graphs)
                    else:
                        accumulate(self._accumulators, gradients)
                    self._added.append(numbers)

    def _clear(self) -> None:
        self._accumulators = None

    def _norm(self, scale: float) -> float:
        gradients = self._accumulated()
        if scale == 1:
            return float(torch.nn.utils.get_total_norm(gradients).item())
        norms = [torch.linalg.vector_norm(gradient * scale) for gradient in gradients]
        return float(torch.linalg.vector_norm(torch.stack(norms)).item())

    def update(self, learning_rate: float, factor: float) -> None:
        self._adamw.update(learning_rate, self._accumulated(), factor)
        self.device.wait()

    def _accumulated(self) -> list[torch.Tensor]:
        if self._accumulators is None:
            self._accumulators = [torch.zeros(p.shape, device=p.device) for p in self._parameters]
        return self._accumulators

    @property
    def _adamw(self) -> AdamW:
        assert self._optimizer is not None, "loaded without an optimizer"
        return self._optimizer

    # ------------------------------------------------------------ what a model gives

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with uncompiled(self._compiled), super()._evaluating(), torch.inference_mode():
            yield

    @torch.no_grad()
    def _row_norms(self) -> Iterator[Array]:
        for parameter in self._parameters:
            yield torch.linalg.vector_norm(parameter, dim=-1, dtype=torch.float32).cpu().numpy()

    # ------------------------------------------------------------ its state

    @property
    def updates(self) -> int:
        return self._adamw.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._adamw.updates = count

    @torch.no_grad()
    def copy_out(self, slot: SlotName, arrays: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        if arrays is None:
            arrays = {name: np.empty(shape, np.float32) for name, shape in self.shapes.items()}
        if slot == "accumulators" and self._accumulators is None:
            for name in self.shapes:
                arrays[name][...] = 0.0
        elif self._torch_device.type == "cpu":
            for name, tensor in zip(self.shapes, self._slot(slot), strict=True):
                np.copyto(arrays[name], tensor.detach().float().numpy())  # a third faster than torch's copy
        else:
            torch._foreach_copy_(self._as_tensors(arrays), self._slot(slot), non_blocking=self._on_cuda)
        self.device.wait()
        return arrays

    @torch.no_grad()
    def copy_in(self, slot: SlotName, arrays: Mapping[str, Array]) -> None:
        tensors = self._as_tensors(arrays)
        if slot == "accumulators" and self._torch_device.type == "cpu":
            self._accumulators = tensors  # the arrays' own memory
        elif slot == "accumulators":
            torch._foreach_copy_(self._accumulated(), tensors, non_blocking=self._on_cuda)
            self.device.wait()  # the arrays may be written to afterwards
        elif slot == "weights":
            self._weights.load(tensors)
        else:
            self._adamw.set_moments(slot, tensors)

    def _slot(self, slot: SlotName) -> list[torch.Tensor]:
        if slot == "accumulators":
            return self._accumulated()
        return [*self._weights.masters] if slot == "weights" else self._adamw.moments(slot)

    def _as_tensors(self, arrays: Mapping[str, Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.asarray(arrays[name], order="C")) for name in self.shapes]

    def _constants(self) -> dict[str, Array]:
        names = self._stored_buffers
        buffers = self._model.named_buffers() if names else ()
        return {name: buffer.detach().float().cpu().numpy() for name, buffer in buffers if name in names}

    @functools.cached_property
    def _stored_buffers(self) -> frozenset[str]:
        """Names of the buffers that the model's files have, of which an adapter's have none. To ask for a model's whole
        state takes long."""
        if self.recipe.adapter is not None:
            return frozenset()
        return frozenset(self._model.state_dict()) & {name for name, _ in self._model.named_buffers()}

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _random_state(self) -> dict[str, NDArray[Any]]:
        states = {"torch.cpu": torch.get_rng_state().numpy()}
        if self._on_cuda:
            states["torch.cuda"] = torch.cuda.get_rng_state(self._torch_device).numpy()
        elif self._torch_device.type == "mps":
            states["torch.mps"] = torch.mps.get_rng_state().numpy()
        return states

    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None:
        if "torch.cpu" in states:
            torch.set_rng_state(torch.from_numpy(states["torch.cpu"].copy()))
        if "torch.cuda" in states and self._on_cuda:
            torch.cuda.set_rng_state(torch.from_numpy(states["torch.cuda"].copy()), self._torch_device)
        if "torch.mps" in states and self._torch_device.type == "mps":
            torch.mps.set_rng_state(torch.from_numpy(states["torch.mps"].copy()))

    def _memory_by_part(self) -> MemoryByPart:
        tensors = (*self._model.parameters(), *self._model.buffers())
        weights = (
            sum(tensor.nbytes for tensor in tensors if tensor.device == self._torch_device) + self._weights.kept_bytes
        )
        if self._optimizer is None:
            return MemoryByPart(weights, 0, 0)
        return MemoryByPart(weights, 4 * sum(p.numel() for p in self._parameters), self._optimizer.held_bytes)

    @classmethod
    def is_out_of_memory(cls, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error)


def widened(gradients: list[torch.Tensor], *, are_overwritten: bool) -> list[torch.Tensor]:
    """Return gradients in float32, each contiguous and alone in its memory, for it is going to be written to. Those
    that have that already are not copied, unless the next pass writes to them. The list is emptied on the way, which
    frees gradients in 16 bits one by one."""
    used: set[int] = set()
    wide = []
    gradients.reverse()
    while gradients:
        gradient = gradients.pop()
        tensor, storage = gradient.float(), gradient.untyped_storage()
        is_shared = storage.nbytes() != gradient.nbytes or storage.data_ptr() in used
        if (tensor is gradient and (is_shared or are_overwritten)) or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        used.add(tensor.data_ptr())
        wide.append(tensor)
    return wide
