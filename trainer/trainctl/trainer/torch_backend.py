"""The backend on PyTorch: CPU, CUDA and Apple's MPS, for any causal language model that transformers loads.

Phases are honest because each ends in a wait for the device: `forward` reads its loss, `backward` synchronises.
"""

import gc
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.runfile import NodeTable, OptimizerTable, RunFile
from trainctl.trainer.backend import (
    Array,
    BackendName,
    DeviceMemoryError,
    Memory,
    State,
    check_state,
    first_line,
    model_config,
)
from trainctl.trainer.batch import Batch
from trainctl.trainer.host_memory import HostMemory, limit_process

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "failed to allocate", "bad allocation")
_IGNORED = -100


class TorchBackend:
    """A `Backend`; see its docstrings. `model` comes in float32."""

    name: BackendName = "torch"

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: OptimizerTable,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | None = None,
        limit_bytes: int | None = None,
    ) -> None:
        self._device = device or torch.device("cpu")
        self._model = model.to(self._device).train()
        named = sorted((name, p) for name, p in model.named_parameters() if p.requires_grad)
        self.shapes: Mapping[str, tuple[int, ...]] = {name: tuple(p.shape) for name, p in named}
        self._parameters = [p for _, p in named]
        self._masters = self._parameters if dtype == torch.float32 else self._lower(dtype)
        self._totals = [torch.zeros_like(p) for p in self._masters]
        self._optimizer = _adamw(self._masters, optimizer)
        self._loss: torch.Tensor | None = None
        self._scratch: tuple[torch.Tensor, ...] = ()
        self._cap_bytes = _device_cap(self._device, limit_bytes)
        self._host = HostMemory(limit_bytes)

    @property
    def device(self) -> str:
        if self._device.type == "cuda":
            return f"{self._device} {torch.cuda.get_device_name(self._device)}"
        return str(self._device)

    def forward(self, batch: Batch, scale: float) -> float:
        with _memory_errors(self):
            loss = self._loss_sum(batch)
            self._loss = loss * scale
            return float(loss.item())

    def backward(self) -> None:
        assert self._loss is not None, "backward follows forward"
        with _memory_errors(self):
            loss, self._loss = self._loss, None
            self._scratch = torch.autograd.grad(loss, self._parameters, allow_unused=True, materialize_grads=True)
            self._synchronize()

    def accumulate(self) -> None:
        with _memory_errors(self):
            whole = [gradient.float() for gradient in self._scratch]  # the same tensors where they are float32 already
            torch._foreach_add_(self._totals, whole)
            self._scratch = ()

    def discard(self) -> None:
        self._loss, self._scratch = None, ()
        gc.collect()  # a graph may hang in reference cycles of the model's outputs
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        elif self._device.type == "mps":
            torch.mps.empty_cache()

    def clear(self) -> None:
        torch._foreach_zero_(self._totals)

    def gradients(self) -> dict[str, Array]:
        return _named(self.shapes, self._totals)

    def gradient_norm(self) -> float:
        return float(torch.nn.utils.get_total_norm(self._totals).item())

    def update(self, learning_rate: float, factor: float) -> None:
        torch._foreach_mul_(self._totals, factor)
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate
        for master, total in zip(self._masters, self._totals, strict=True):
            master.grad = total
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._publish()
        self._synchronize()

    def evaluate(self, batch: Batch) -> float:
        self._model.eval()
        try:
            with _memory_errors(self), torch.inference_mode():
                return float(self._loss_sum(batch).item())
        finally:
            self._model.train()

    def memory(self) -> Memory:
        if self._device.type == "cuda":
            # Once, not per number: each of torch's shorthands flattens and sorts the allocator's whole statistics.
            allocated = torch.cuda.memory_stats_as_nested_dict(self._device)["allocated_bytes"]["all"]
            return Memory(allocated["current"], allocated["peak"], self._cap_bytes)
        if self._device.type == "mps":
            return Memory(torch.mps.current_allocated_memory(), None, self._cap_bytes)
        return self._host.read()

    def export_state(self) -> State:
        moments = [self._optimizer.state[master] for master in self._masters]
        return State(
            _named(self.shapes, self._masters),
            _named(self.shapes, [moment["exp_avg"] for moment in moments]),
            _named(self.shapes, [moment["exp_avg_sq"] for moment in moments]),
            int(moments[0]["step"].item()),
            self._random_state(),
        )

    @torch.no_grad()
    def import_state(self, state: State) -> None:
        check_state(state, self.shapes, "checkpoint")
        for name, master in zip(self.shapes, self._masters, strict=True):
            master.copy_(_tensor(state.weights[name]))
            moment = self._optimizer.state[master]
            moment["exp_avg"].copy_(_tensor(state.first_moments[name]))
            moment["exp_avg_sq"].copy_(_tensor(state.second_moments[name]))
            moment["step"].fill_(state.updates)
        self._publish()
        self._restore_random(state.random)

    def _loss_sum(self, batch: Batch) -> torch.Tensor:
        inputs = torch.from_numpy(batch.inputs).to(self._device, torch.int64)
        targets = torch.from_numpy(np.where(batch.counted > 0, batch.targets, _IGNORED)).to(self._device, torch.int64)
        logits = self._model(input_ids=inputs, use_cache=False).logits
        flat = logits.float().flatten(0, 1)
        return torch.nn.functional.cross_entropy(flat, targets.flatten(), ignore_index=_IGNORED, reduction="sum")

    def _lower(self, dtype: torch.dtype) -> list[torch.nn.Parameter]:
        """Float32 masters of the parameters, which become `dtype`; buffers (rotary frequencies) stay float32."""
        masters = [torch.nn.Parameter(p.detach().clone()) for p in self._parameters]
        for p in self._parameters:
            p.data = p.data.to(dtype)
        return masters

    @torch.no_grad()
    def _publish(self) -> None:
        if self._masters is not self._parameters:
            torch._foreach_copy_([*self._parameters], [*self._masters])

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        elif self._device.type == "mps":
            torch.mps.synchronize()

    def _random_state(self) -> dict[str, NDArray[Any]]:
        states = {"torch.cpu": torch.get_rng_state().numpy()}
        if self._device.type == "cuda":
            states["torch.cuda"] = torch.cuda.get_rng_state(self._device).numpy()
        return states

    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None:
        if "torch.cpu" in states:
            torch.set_rng_state(torch.from_numpy(states["torch.cpu"].copy()))
        if "torch.cuda" in states and self._device.type == "cuda":
            torch.cuda.set_rng_state(torch.from_numpy(states["torch.cuda"].copy()), self._device)


def load_torch(config: RunFile, node: NodeTable, where: str) -> TorchBackend:
    """The model of `config` as float32 masters on the node's device. Raises InvalidInputError naming the field."""
    if node.threads:
        torch.set_num_threads(node.threads)
    device = _device(node.device, where)
    torch.manual_seed(config.run.seed)
    model = read_model(Path(config.model.path), where)
    limit_bytes = None if node.memory_limit_gb is None else int(node.memory_limit_gb * 1e9)
    if limit_bytes:
        _limit(device, limit_bytes)
    try:
        return TorchBackend(
            model, config.optimizer, dtype=_DTYPES[config.model.dtype], device=device, limit_bytes=limit_bytes
        )
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        raise InvalidInputError(
            f"{where}: model.path", f"the model and its optimizer do not fit on {device}: {first_line(error)}"
        ) from None


def read_model(path: Path, where: str) -> torch.nn.Module:
    """The causal language model in a Hugging Face directory, in float32; nothing is fetched and no code in it is run.

    Raises InvalidInputError if a weight is missing, of the wrong shape, or the files cannot be read.
    """
    model_config(path)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers
    from safetensors import SafetensorError

    loader: Any = transformers.AutoModelForCausalLM
    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model, notes = loader.from_pretrained(
            path, dtype=torch.float32, local_files_only=True, use_safetensors=True, output_loading_info=True
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        raise InvalidInputError(f"{where}: model.path", f"cannot load {path}: {first_line(error)}") from None
    if notes["missing_keys"]:
        raise InvalidInputError(f"{where}: model.path", f"{path} lacks the weight {sorted(notes['missing_keys'])[0]!r}")
    loaded: torch.nn.Module = model
    return loaded


@contextmanager
def _memory_errors(backend: TorchBackend) -> Iterator[None]:
    """Turn torch's several ways of saying that memory ran out into DeviceMemoryError, the scratch emptied."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not _is_out_of_memory(error):
            raise
        text = first_line(error)
    else:
        return
    backend.discard()  # outside the handler, so that the traceback's frames no longer hold the graph
    raise DeviceMemoryError(text)


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(words in str(error).lower() for words in _OUT_OF_MEMORY)


def _adamw(masters: list[torch.nn.Parameter], table: OptimizerTable) -> torch.optim.AdamW:
    """torch.optim.AdamW, decay on matrices only, its moments allocated now so that a lack of memory shows at load."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in masters if p.ndim >= 2], "weight_decay": table.weight_decay},
        {"params": [p for p in masters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=table.learning_rate, betas=(table.beta1, table.beta2), eps=table.epsilon)
    for master in masters:
        optimizer.state[master] = {
            "step": torch.tensor(0.0),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
    return optimizer


def _device(wanted: str, where: str) -> torch.device:
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if wanted in ("auto", "gpu"):
        found = "cuda:0" if cuda else "mps" if mps else "cpu"
        if wanted == "gpu" and found == "cpu":
            raise InvalidInputError(f"{where}: nodes.device", "torch sees no GPU on this machine")
        return torch.device(found)
    device = torch.device("cuda:0" if wanted == "cuda" else wanted)
    missing = (device.type == "cuda" and (not cuda or (device.index or 0) >= torch.cuda.device_count())) or (
        device.type == "mps" and not mps
    )
    if missing:
        raise InvalidInputError(f"{where}: nodes.device", f"torch sees no device {wanted!r} on this machine")
    return device


def _device_cap(device: torch.device, limit_bytes: int | None) -> int | None:
    """What the trainer may hold on its device; None on a CPU, whose memory is the host's."""
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory)
    elif device.type == "mps":
        total = int(torch.mps.recommended_max_memory())
    else:
        return None
    return min(total, limit_bytes or total)


def _limit(device: torch.device, limit_bytes: int) -> None:
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / total), device)
    elif device.type == "mps":
        torch.mps.set_per_process_memory_fraction(min(2.0, limit_bytes / torch.mps.recommended_max_memory()))
    else:
        limit_process(limit_bytes)


def _named(names: Mapping[str, tuple[int, ...]], tensors: list[Any]) -> dict[str, Array]:
    return {
        name: tensor.detach().to("cpu", torch.float32, copy=True).numpy()
        for name, tensor in zip(names, tensors, strict=True)
    }


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))
