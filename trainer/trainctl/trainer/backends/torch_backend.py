"""The backend on PyTorch: CPU, CUDA and Apple's MPS, for any causal or encoder-decoder model that transformers loads.

On CUDA the host runs ahead of the device by at most one micro-batch, and phases are timed by events in the device's
queue. On MPS `forward` and `backward` end in a wait for the device; on a CPU work is done when a call returns.
"""

import functools
import gc
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters import torch_lora
from trainctl.trainer.attention import torch_varlen
from trainctl.trainer.attention.document_bounds import VARLEN
from trainctl.trainer.backends import pinned_memory, torch_generation
from trainctl.trainer.backends.activation_checkpointing import checkpoint_torch
from trainctl.trainer.backends.base import (
    ADAMW_SLOTS,
    Array,
    Backend,
    BackendName,
    Decoding,
    FixedParts,
    Memory,
    Part,
    Parts,
    ProbePass,
)
from trainctl.trainer.backends.chunked_loss import TorchChunks, chunking_of
from trainctl.trainer.backends.host_memory import HostMemory, SampledMemory
from trainctl.trainer.backends.torch_adamw import adamw, check_optimizer
from trainctl.trainer.backends.torch_compile import CompiledLayers, check_graphs, uncompiled
from trainctl.trainer.backends.torch_device import (
    choose_device,
    choose_kernels,
    limit_memory,
    memory_cap,
    warn_of_slow_type,
)
from trainctl.trainer.backends.torch_model import Nf4, read_model
from trainctl.trainer.backends.torch_outputs import TorchOutputs
from trainctl.trainer.backends.torch_probe import probing
from trainctl.trainer.backends.torch_weights import TorchWeights, accumulate
from trainctl.trainer.common.libraries import versions_in_use
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Sums

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_NO_OPTIMIZER = "loaded without an optimizer"


class TorchBackend(Backend):
    """`model` comes in float32; with an adapter attached, its own weights frozen and in `dtype`; without an optimizer,
    all in `dtype`."""

    name: BackendName = "torch"
    out_of_memory_words = (
        "out of memory", "can't allocate memory", "not enough memory", "failed to allocate", "bad allocation",
        "invalid buffer size",  # of Metal, above its largest buffer
    )  # fmt: skip

    def __init__(
        self, model: torch.nn.Module, parts: Parts, *, dtype: torch.dtype = torch.float32,
        device: torch.device | None = None, compiled: CompiledLayers | None = None,
    ) -> None:  # fmt: skip
        """`compiled`: its layers, if they are."""
        self.parts = parts
        self._dtype = dtype
        self._device = device or torch.device("cpu")
        self._model = model.to(self._device).train()
        self._outputs = TorchOutputs(self._model, self._device, parts.adapter)
        self._compiled = self._outputs.compiled = compiled
        if compiled is not None:
            self.compile_meter = compiled.meter
        named = sorted((torch_lora.stored_name(name), p) for name, p in model.named_parameters() if p.requires_grad)
        self.shapes = {name: tuple(p.shape) for name, p in named}
        self._parameters = [p for _, p in named]
        is_whole = parts.adapter is None and parts.optimizer is not None  # buffers (rotary frequencies) stay float32
        self._weights = TorchWeights(self._parameters, dtype if is_whole else None)
        self._totals: list[torch.Tensor] | None = None  # None: zeros
        self._optimizer = None if parts.optimizer is None else adamw(self._weights, parts.optimizer)
        self.slots = () if parts.optimizer is None else ADAMW_SLOTS
        self._views: dict[Part, tuple[list[int], list[Array]]] = {}  # of parts, with their addresses
        self._loss: torch.Tensor | None = None
        self._scratch: tuple[torch.Tensor, ...] = ()
        self._sums: list[torch.Tensor] = []  # of the last forward
        self._added: list[list[torch.Tensor]] = []  # of each micro-batch since `clear`
        self._queued: deque[torch.cuda.Event] = deque()  # at the end of each backward that may still be running
        self._cap_bytes = memory_cap(self._device, parts.limit_bytes)
        self._memory = (
            SampledMemory(torch.mps.current_allocated_memory, self._cap_bytes)
            if self._device.type == "mps"
            else HostMemory(parts.limit_bytes)
        )

    @classmethod
    def open(cls, config: RunFile, node: NodeTable, parts: Parts, where: str) -> "TorchBackend":
        if node.rank_threads:
            torch.set_num_threads(node.rank_threads)
        device, dtype = choose_device(node.device, where), _DTYPES[config.model.computed]
        if parts.optimizer is not None:
            check_optimizer(parts.optimizer, where)
        if parts.adapter is not None and parts.optimizer is not None:
            check_graphs(config.model.compile, device, where)
        choose_kernels(device, node, tf32=config.model.tf32)
        warn_of_slow_type(device, config.model.computed)
        torch.manual_seed(config.run.seed)
        trained = parts.adapter is None and parts.optimizer is not None
        held, stored = torch.float32 if trained else dtype, config.model.init == "pretrained"
        computed = _DTYPES[config.model.compute_dtype or config.model.computed]
        packing = Nf4(device, computed, config.model.double_quantization) if config.model.base == "nf4" else None
        model = read_model(Path(config.model.path), where, held, with_weights=stored, packing=packing)
        if config.model.attention == VARLEN:
            torch_varlen.adopt(model, device, dtype, config.data.sequence_length, where)
        if parts.limit_bytes:
            limit_memory(device, parts.limit_bytes)
        if parts.adapter is not None:
            model = torch_lora.attach(model.to(device), parts.adapter)
        checkpoint_torch(model, config.model.gradient_checkpointing, where)
        compiled, mode = None, config.model.compile
        if mode != "off" and parts.optimizer is not None:
            compiled = CompiledLayers(model, mode, device, config.data, where)
        return cls(model, parts, dtype=dtype, device=device, compiled=compiled)

    def chunk_losses(self, config: RunFile, where: str) -> None:
        chunking = chunking_of(config, self.memory(), of_host=self._device.type != "cuda")
        self._outputs.chunks = TorchChunks(self._model, chunking, where)

    @property
    def chunks(self) -> TorchChunks | None:
        """What computes losses of some tokens at a time."""
        return self._outputs.chunks

    @classmethod
    def is_out_of_memory(cls, error: BaseException) -> bool:
        return isinstance(error, torch.OutOfMemoryError) or super().is_out_of_memory(error)

    @property
    def device(self) -> str:
        if self._device.type == "cuda":
            return f"{self._device} {torch.cuda.get_device_name(self._device)}"
        return str(self._device)

    def forward(self, batch: Batch, *scales: float) -> None:
        with self._memory_errors():
            given = batch if self._compiled is None else self._compiled.prepared(batch)
            sums = self.parts.objective.sums(self._outputs(given))
            terms = [loss * scale for loss, scale in zip(sums.losses.values(), scales, strict=True)]
            self._loss = functools.reduce(torch.add, terms)
            self._sums = [found.detach() for found in sums.numbers()]
            if self._device.type == "mps":  # or memory is read before it is taken
                torch.mps.synchronize()
            self._memory.sample()  # while the graph is held

    def backward(self) -> None:
        assert self._loss is not None, "backward follows forward"
        with self._memory_errors():
            loss, self._loss = self._loss, None
            self._scratch = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
            if self._device.type == "mps":  # or memory is read before it is taken
                torch.mps.synchronize()
            self._keep_close()
            self._memory.sample()

    def accumulate(self) -> None:
        with self._memory_errors():
            if self._totals is None:
                self._totals = self._widened()
            else:
                accumulate(self._totals, self._scratch)
            self._added.append(self._sums)
            self._scratch, self._sums = (), []

    def _widened(self) -> list[torch.Tensor]:
        """The scratch in float32; each of its tensors in 16 bits is dropped once it has been copied."""
        if self._compiled is not None and self._compiled.keeps_graphs:
            whole = torch.contiguous_format
            return [gradient.to(torch.float32, copy=True, memory_format=whole) for gradient in self._scratch]
        if {gradient.dtype for gradient in self._scratch} == {torch.float32}:
            return _owned([*self._scratch])
        waiting, self._scratch = deque(self._scratch), ()
        made = []
        while waiting:
            made.append(waiting.popleft().float())
        return _owned(made)

    def forget(self) -> None:
        self._loss, self._scratch, self._sums = None, (), []

    def discard(self) -> None:
        self.forget()
        gc.collect()  # a graph may hang in reference cycles of the model's outputs
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif self._device.type == "mps":
            torch.mps.empty_cache()

    def clear(self) -> None:
        self._totals, self._added = None, []

    def _read(self, with_norm: bool) -> tuple[list[list[float]], float | None]:
        norms = [torch.nn.utils.get_total_norm(self._gradients())] if with_norm else []
        found = [number.float() for row in self._added for number in row] + norms
        numbers: list[float] = torch.stack(found).tolist() if found else []
        width = len(self._added[0]) if self._added else 1
        ends = range(0, len(numbers) - len(norms), width)
        return [numbers[at : at + width] for at in ends], numbers[-1] if norms else None

    def _norm(self, scale: float) -> float:
        totals = self._gradients()
        return float(torch.nn.utils.get_total_norm(totals if scale == 1 else torch._foreach_mul(totals, scale)).item())

    def mark(self) -> torch.cuda.Event | None:
        if self._device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds_between(self, begun: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        return float(begun.elapsed_time(ended)) / 1000

    def update(self, learning_rate: float, factor: float) -> None:
        assert self._optimizer is not None, _NO_OPTIMIZER
        self._optimizer.update(learning_rate, self._gradients(), factor)
        self.wait()

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        with uncompiled(self._compiled), super()._evaluating():
            yield

    def evaluate(self, batch: Batch) -> Sums:
        with self._evaluating(), torch.inference_mode():
            outputs = self._outputs(batch)
            sums = self.parts.objective.sums(outputs)
            more = self.parts.objective.held_out_sums(outputs)
            found = torch.stack([number.float() for number in (*sums.numbers(), *more.values())]).tolist()
            rewards = None if sums.rewards is None else sums.rewards.cpu().numpy()
            return self.parts.objective.evaluated(found, [*more], rewards)

    def token_log_probabilities(self, batch: Batch) -> Array:
        with self._evaluating(), torch.inference_mode():
            losses: Array = self._outputs.losses(batch, None, "none").cpu().numpy()
            return -losses

    def probe(self, batch: Batch, flips: int) -> ProbePass:
        with self._evaluating(), torch.inference_mode(), probing(self._model, flips) as layers:
            vocabulary = self._outputs(batch).vocabulary(with_reference=False)
            pieces = ((piece.logits.cpu().numpy(), piece.targets.cpu().numpy()) for piece in vocabulary)
            return ProbePass.of(batch, pieces, layers)

    def reference_log_probabilities(self, batch: Batch) -> Array:
        with self._outputs.without_adapter():
            return self.token_log_probabilities(batch)

    @torch.no_grad()
    def _row_norms(self) -> Iterator[Array]:
        for parameter in self._parameters:
            yield torch.linalg.vector_norm(parameter, dim=-1, dtype=torch.float32).cpu().numpy()

    @property
    def compute(self) -> Compute:
        dtype, on_cuda = str(self._dtype).removeprefix("torch."), self._device.type == "cuda"
        return Compute(
            dtype,
            torch.backends.cuda.matmul.allow_tf32 if on_cuda else None,
            compile="off" if self._compiled is None else self._compiled.mode,
            attention=self._outputs.attention,
            weights=self.parts.weights_in(dtype),
            deterministic=torch.are_deterministic_algorithms_enabled() if on_cuda else None,
            cudnn_benchmark=torch.backends.cudnn.benchmark if on_cuda else None,
            update=self._optimizer.library if on_cuda and self._optimizer is not None else "",
            versions=versions_in_use(self.device),
        )

    def reset_peak(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            self._memory.reset()

    def memory(self) -> Memory:
        if self._device.type == "cuda":
            # Once, not per number: each of torch's shorthands flattens and sorts the allocator's whole statistics.
            stats = torch.cuda.memory_stats_as_nested_dict(self._device)
            allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]["current"]
            cache = reserved - allocated["current"]
            return Memory(allocated["current"], allocated["peak"], self._cap_bytes, cache)
        found = self._memory.read()
        if self._device.type == "mps":
            kept = torch.mps.driver_allocated_memory() - torch.mps.current_allocated_memory()
            found = replace(found, cache_bytes=kept)
        return found

    def _fixed_parts(self) -> FixedParts:
        held = (*self._model.parameters(), *self._model.buffers())
        weights = sum(tensor.nbytes for tensor in held if tensor.device == self._device) + self._weights.kept_bytes
        if self._optimizer is None:
            return FixedParts(weights, 0, 0)
        return FixedParts(weights, 4 * sum(p.numel() for p in self._parameters), self._optimizer.held_bytes)

    @property
    def updates(self) -> int:
        assert self._optimizer is not None, _NO_OPTIMIZER
        return self._optimizer.updates

    @updates.setter
    def updates(self, count: int) -> None:
        assert self._optimizer is not None, _NO_OPTIMIZER
        self._optimizer.updates = count

    @torch.no_grad()
    def copy_out(self, part: Part, arrays: Mapping[str, Array]) -> None:
        on_cuda = self._device.type == "cuda"
        if part == "accumulators" and self._totals is None:
            for name in self.shapes:
                arrays[name][...] = 0.0
        elif (held := self._host_views(part)) is not None:
            for name, values in zip(self.shapes, held, strict=True):
                np.copyto(arrays[name], values)  # a third faster than torch's copy
        else:
            torch._foreach_copy_(self._on_host(arrays), self._part(part), non_blocking=on_cuda)
        self.wait()

    def host_arrays(self) -> dict[str, Array]:
        if self._device.type != "cuda":
            return super().host_arrays()
        return dict(zip(self.shapes, pinned_memory.pinned_arrays(self.shapes.values()), strict=True))

    def pin(self, flat: Array) -> None:
        if self._device.type == "cuda":
            pinned_memory.register(flat)

    @torch.no_grad()
    def copy_in(self, part: Part, arrays: Mapping[str, Array]) -> None:
        if part == "accumulators":  # on a CPU the arrays' memory
            on_cuda = self._device.type == "cuda"
            self._totals = [tensor.to(self._device, non_blocking=on_cuda) for tensor in self._on_host(arrays)]
            if on_cuda:
                self.wait()  # the arrays may be written to afterwards
            return
        if part == "weights":
            self._weights.load(self._on_host(arrays))
            return
        assert self._optimizer is not None, _NO_OPTIMIZER
        self._optimizer.set_moments(part, self._on_host(arrays))

    def _on_host(self, arrays: Mapping[str, Array]) -> list[torch.Tensor]:
        return [torch.from_numpy(np.asarray(arrays[name], order="C")) for name in self.shapes]

    def _host_views(self, part: Part) -> list[Array] | None:
        """The memory of a part that stays where it is, on a CPU in float32; looked for again where it has moved. None
        of other parts, which views would keep in memory."""
        table = self.parts.optimizer
        if self._device.type != "cpu" or part == "accumulators" or table is None or table.kind != "adamw":
            return None
        tensors = self._part(part)
        places = [tensor.data_ptr() for tensor in tensors]
        known = self._views.get(part)
        if known is None or known[0] != places:
            known = self._views[part] = places, [tensor.detach().numpy() for tensor in tensors]
        return known[1]

    def _part(self, part: Part) -> list[torch.Tensor]:
        if part == "accumulators":
            return self._gradients()
        if part == "weights":
            return [*self._weights.masters]
        assert self._optimizer is not None, _NO_OPTIMIZER
        return self._optimizer.moments(part)

    def _gradients(self) -> list[torch.Tensor]:
        if self._totals is None:
            self._totals = [torch.zeros(p.shape, device=p.device) for p in self._parameters]
        return self._totals

    def wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def _keep_close(self) -> None:
        """Wait until the micro-batch before this one is done: a host far ahead would show no sign of life for long, and
        couldn't be fenced."""
        mark = self.mark()
        if mark is not None:
            self._queued.append(mark)
            if len(self._queued) > 1:
                self._queued.popleft().synchronize()

    def _seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def _generated(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        return torch_generation.generate(self._model, prompt, how, ends, on_token)

    def _constants(self) -> dict[str, Array]:
        names = self._stored_buffers
        if not names:
            return {}
        buffers = self._model.named_buffers()
        return {name: buffer.detach().float().cpu().numpy() for name, buffer in buffers if name in names}

    @functools.cached_property
    def _stored_buffers(self) -> frozenset[str]:
        """Names of the buffers that the model's files have, of which an adapter's have none. To ask for a model's whole
        state takes long."""
        if self.parts.adapter is not None:
            return frozenset()
        return frozenset(self._model.state_dict()) & {name for name, _ in self._model.named_buffers()}

    def _random_state(self) -> dict[str, NDArray[Any]]:
        states = {"torch.cpu": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            states["torch.cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        elif self._device.type == "mps":
            states["torch.mps"] = torch.mps.get_rng_state().numpy()
        return states

    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None:
        if "torch.cpu" in states:
            torch.set_rng_state(torch.from_numpy(states["torch.cpu"].copy()))
        if "torch.cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(states["torch.cuda"].copy()), self._device)
        if "torch.mps" in states and self._device.type == "mps":
            torch.mps.set_rng_state(torch.from_numpy(states["torch.mps"].copy()))


def _owned(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors, those copied that don't have their memory whole and to themselves: what autograd gives may share
    it, and is going to be written to."""
    used: set[int] = set()
    owned = []
    for tensor in tensors:
        storage = tensor.untyped_storage()
        alone = tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and storage.data_ptr() not in used
        used.add(storage.data_ptr())
        owned.append(tensor if alone else tensor.clone(memory_format=torch.contiguous_format))
    return owned
