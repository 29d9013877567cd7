"""The backend on MLX, for Apple GPUs and CPUs: any causal model of mlx-lm that keeps its Hugging Face names.

MLX is lazy and differentiates by building one graph. The forward phase builds it, tracing included, and evaluates the
loss, which keeps the activations that the gradient needs; the backward phase evaluates the gradient. What a primitive
recomputes for its gradient counts as backward. AdamW is written out here (see backend.py) because mlx.optimizers takes
its bias corrections from float32 powers, off by 1.3e-5 at beta2 = 0.999, and counts its steps per optimizer.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters import mlx_lora
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.adapters.mlx_lora import Place
from trainctl.trainer.backends.backend import (
    ADAMW_SLOTS,
    Backend,
    BackendName,
    Device,
    MakePhase,
    SlotName,
    TrainingRecipe,
    is_decayed,
)
from trainctl.trainer.backends.memory import HostMemory, Memory, MemoryByPart
from trainctl.trainer.backends.mlx_passes import MlxOutputs, MlxPasses
from trainctl.trainer.backends.passes import Array
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.common.libraries import versions_in_use
from trainctl.trainer.common.logs import log
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.model.mlx_model import checkpoint_layers, flat, read_model, set_dtype

Arrays = dict[str, Any]
_PIECES = 64
"""Pieces in which a model is added and updated: what is computed on the way takes several times as much as a piece."""
_MIN_PIECE_VALUES, _MAX_PIECE_VALUES = 1 << 16, 1 << 22
"""Values that are worth an evaluation, and enough to keep a device busy."""


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


class MlxMemory:
    """Memory by MLX's allocator, which keeps the peak."""

    def __init__(self, limit_bytes: int | None) -> None:
        self._limit_bytes = limit_bytes

    def read(self) -> Memory:
        device: dict[str, Any] = mx.device_info()
        cap = self._limit_bytes or device.get("max_recommended_working_set_size") or mx.get_memory_limit()
        used = mx.get_active_memory()
        peak = max(used, mx.get_peak_memory())  # a reset peak is 0 until something is allocated
        return Memory(used, peak, cap, mx.get_cache_memory())

    def reset(self) -> None:
        mx.reset_peak_memory()

    def sample(self) -> None:
        """Do nothing: the allocator misses nothing."""


class MlxDevice(Device):
    """A CPU or Apple's GPU. On a CPU, memory is the process's, as on torch."""

    def __init__(self, limit_bytes: int | None) -> None:
        if mx.default_device() == mx.Device(mx.gpu):
            name = f"gpu {mx.device_info().get('device_name', '')}".strip()
            super().__init__(name, MlxMemory(limit_bytes))
        else:
            super().__init__("cpu", HostMemory(limit_bytes))

    def host_arrays(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        return None

    def free_cache(self) -> None:
        super().free_cache()
        mx.clear_cache()


class MlxBackend(Backend):
    """`model` is an mlx-lm model, its parameters in any float type; `recipe.adapter` is attached to it here."""

    name: BackendName = "mlx"
    out_of_memory_words = ("malloc", "out of memory", "insufficient memory", "unable to allocate", "bad_alloc")
    passes: MlxPasses
    _accumulators: Arrays  # empty: zeros

    def __init__(self, model: Any, recipe: TrainingRecipe, *, dtype: Any = mx.float32) -> None:
        self._model, self.recipe, self._dtype = model, recipe, dtype
        adapter = recipe.adapter
        self.device = MlxDevice(recipe.limit_bytes)
        if adapter is not None:
            set_dtype(model, dtype)
        self._places = _places(model, adapter)
        self.passes = MlxPasses(model, adapter)
        stored = dict(flat(model.trainable_parameters()))
        is_trained = adapter is not None or recipe.optimizer is not None
        weights = {
            name: stored[place.name].astype(mx.float32 if is_trained else dtype) for name, place in self._places.items()
        }
        has_masters = recipe.trains_all_weights and dtype != mx.float32
        self._weights = MlxWeights(weights, dtype if has_masters else None)
        self.shapes = {name: _turned(p, self._places[name]).shape for name, p in self._weights.computed.items()}
        sizes = {name: p.size for name, p in self._weights.computed.items()}
        self._piece_values = min(_MAX_PIECE_VALUES, max(_MIN_PIECE_VALUES, sum(sizes.values()) // _PIECES))
        self._groups = _grouped(sizes, self._piece_values)
        self.slots = () if recipe.optimizer is None else ADAMW_SLOTS
        self._moments: dict[SlotName, Arrays] = {slot: self._zeros() for slot in self.slots}
        self.updates = 0
        self._differentiate: Callable[..., Any] = mx.value_and_grad(self._scaled_loss)
        mx.eval(self._weights.computed, self._weights.masters, self._moments)
        model.train()
        self._publish()
        self.memory_by_part = self._memory_by_part()
        self.clear()

    @classmethod
    def open(cls, config: RunFile, node: NodeTable, recipe: TrainingRecipe, where: str) -> "MlxBackend":
        if config.model.attention != "auto":
            problem = f'"{config.model.attention}" needs torch on an NVIDIA GPU, and this rank is on MLX'
            raise InvalidInputError(f"{where}: model.attention", f'{problem}; set attention = "auto"')
        _choose_device(node.device, where)
        mx.random.seed(config.run.seed)
        if recipe.limit_bytes:
            mx.set_memory_limit(recipe.limit_bytes)
        path, stored = Path(config.model.path), config.model.init == "pretrained"
        model = read_model(path, where, config.data.sequence_length, with_weights=stored)
        checkpoint_layers(model, config.model.gradient_checkpointing, where)
        if config.model.compile != "off":
            log.warning("[model] compile has no effect on MLX")
        return cls(model, recipe, dtype=getattr(mx, config.model.computed))

    @property
    def compute(self) -> Compute:
        tf32 = None if self.device.name == "cpu" else os.environ.get("MLX_ENABLE_TF32") != "0"
        dtype = str(self._dtype).removeprefix("mlx.core.")
        weights = self.recipe.weights_in(dtype)
        return Compute(dtype, tf32, attention="mx.fast", weights=weights, versions=versions_in_use(self.device.name))

    # ------------------------------------------------------------ a step

    def _pass(
        self,
        batch: Batch,
        scales: Mapping[str, float],
        adding: AbstractContextManager[object] | None,
        phase: MakePhase,
    ) -> None:
        with phase("forward"):
            try:
                (_, numbers), gradients = self._differentiate(self._weights.computed, batch, scales)
            finally:
                self._publish()  # tracing left its own arrays in the model
            mx.eval(numbers)
            self.device.end_pass(backward=False)
        with phase("backward"):
            mx.eval(gradients)
            self.device.end_pass(backward=True)
            if adding is not None:
                with adding:
                    self._add(gradients)
                    self._added.append(numbers)

    def _scaled_loss(self, weights: Arrays, batch: Batch, scales: Mapping[str, float]) -> tuple[Any, list[Any]]:
        self._model.update(self._tree(weights))
        sums = self.recipe.objective.sums(MlxOutputs(self.passes, batch))
        terms = [sums.losses[name] * scale for name, scale in scales.items()]
        return functools.reduce(mx.add, terms), self.recipe.objective.numbers(sums)

    def _add(self, gradients: Arrays) -> None:
        """Add the largest group first, and free its gradients: if memory suffices for it, it does for the others. Once
        one has been added, the micro-batch can't be repeated: too little memory for a later one ends the rank."""
        for number, names in enumerate(self._groups):
            totals: Arrays = {}
            for name in names:
                total, gradient = self._accumulators.get(name), gradients[name]
                totals[name] = gradient.astype(mx.float32) if total is None else total + gradient
            try:
                mx.eval(totals)
            except (RuntimeError, MemoryError) as error:
                if number and self.is_out_of_memory(error):
                    problem = f"out of memory when a part of a gradient had been added: {first_line(error)}"
                    raise TrainctlError(problem) from None
                raise
            self._accumulators |= totals
            for name in names:
                del gradients[name]

    def _clear(self) -> None:
        self._accumulators = {}

    def _norm(self, scale: float) -> float:
        gradients = self._accumulated()
        squares: Arrays = {}
        for names in self._groups:
            scaled = {name: gradients[name] if scale == 1 else gradients[name] * scale for name in names}
            squares |= {name: mx.sum(mx.square(array)) for name, array in scaled.items()}
            mx.eval(squares)
        total: Any = mx.sum(mx.stack([squares[name] for name in gradients]))
        return math.sqrt(float(total.item()))

    # MLX writes a result to the memory of an operand that nothing else refers to. So an update needs no second copy of
    # the model, as long as this holds whenever a group is evaluated: no dict, local name or module refers to the old
    # arrays of its parameters, moments and gradients.

    def update(self, learning_rate: float, factor: float) -> None:
        """Update group by group, and free each gradient on the way."""
        self.updates += 1
        gradients = self._accumulated()
        self._accumulators = {}
        for names in self._groups:
            for name in names:
                self._update_parameter(name, gradients.pop(name), learning_rate, factor)
            new = {name: self._weights.computed[name] for name in names}
            self._model.update(self._tree(new))  # before they are computed, or the model would hold the old ones
            mx.eval(self._weights.computed, self._weights.masters, self._moments)

    def _update_parameter(self, name: str, g: Any, rate: float, factor: float) -> None:
        p = self._weights.masters[name]
        # `astype` gives new objects, so that slices assigned to them below show in no array that someone else holds
        m, v = (self._moments[slot].pop(name).astype(mx.float32) for slot in ADAMW_SLOTS)
        if p.size <= self._piece_values:
            new, m, v = self._adamw(p, g * factor, m, v, rate)
        else:  # what is computed on the way takes several times as much as the result
            new, rows = mx.zeros(p.shape), max(1, self._piece_values * len(p) // p.size)
            for start in range(0, len(p), rows):
                part = slice(start, start + rows)
                pieces = self._adamw(p[part], g[part] * factor, m[part], v[part], rate)
                mx.eval(pieces)
                new[part], m[part], v[part] = pieces
                mx.eval(new, m, v)
        self._moments["exp_avg"][name], self._moments["exp_avg_sq"][name] = m, v
        self._weights.store(name, new)

    def _adamw(self, p: Any, g: Any, m: Any, v: Any, rate: float) -> tuple[Any, Any, Any]:
        """Return one parameter and its moments updated; the bias corrections are taken in double precision."""
        table = self.recipe.optimizer
        assert table is not None, "loaded without an optimizer"
        b1, b2 = table.beta1, table.beta2
        if is_decayed(p.shape) and table.weight_decay:
            p = p * (1 - rate * table.weight_decay)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * mx.square(g)
        denominator = mx.sqrt(v) / math.sqrt(1 - b2**self.updates) + table.epsilon
        return p - (rate / (1 - b1**self.updates)) * m / denominator, m, v

    def _accumulated(self) -> Arrays:
        if not self._accumulators:
            self._accumulators = self._zeros()
            mx.eval(self._accumulators)
        return self._accumulators

    def _zeros(self) -> Arrays:
        return {name: mx.zeros(p.shape) for name, p in self._weights.computed.items()}

    def _publish(self) -> None:
        self._model.update(self._tree(self._weights.computed))
        mx.eval(self._model.parameters())

    def _tree(self, weights: Arrays) -> Any:
        """Return the model's trainable part."""
        return tree_unflatten([(self._places[name].name, p) for name, p in weights.items()])

    # ------------------------------------------------------------ what a model gives

    def _row_norms(self) -> Iterator[Array]:
        held = dict(flat(self._model.trainable_parameters()))
        for place in self._places.values():
            yield np.array(mx.linalg.norm(held[place.name].astype(mx.float32), axis=-1))

    # ------------------------------------------------------------ its state

    def copy_out(self, slot: SlotName, arrays: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Return the arrays' own memory where there is no other to copy to: MLX never writes to an array that something
        else refers to."""
        own = {
            name: _turned(np.asarray(array.astype(mx.float32)), self._places[name])
            for name, array in self._slot(slot).items()
        }
        if arrays is None:
            return own
        for name, array in own.items():
            np.copyto(arrays[name], array)
        return arrays

    def copy_in(self, slot: SlotName, arrays: Mapping[str, Array]) -> None:
        """Replace one array after another: none is held twice."""
        values = {} if slot == "weights" else self._slot(slot)
        for name, place in self._places.items():
            array = mx.array(_turned(arrays[name], place))
            if slot == "weights":
                self._weights.store(name, array)
            else:
                values[name] = array
            mx.eval(array)
        if slot == "weights":
            mx.eval(self._weights.computed, self._weights.masters)
            self._publish()

    def _slot(self, slot: SlotName) -> Arrays:
        if slot == "accumulators":
            return self._accumulated()
        return dict(self._weights.masters) if slot == "weights" else self._moments[slot]

    def _constants(self) -> dict[str, Array]:
        if self.recipe.adapter is not None:
            return {}
        frozen = (pair for pair in flat(self._model.parameters()) if pair[0] not in self.shapes)
        return {name: np.array(array.astype(mx.float32)) for name, array in frozen}

    def _seed(self, seed: int) -> None:
        mx.random.seed(seed)

    def _random_state(self) -> dict[str, NDArray[Any]]:
        state: Any = mx.random.state
        return {"mlx.key": np.array(state[0])}

    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None:
        """Set the generator's key, two words of 32 bits: MLX makes it of a seed's high and low word."""
        if "mlx.key" in states:
            high, low = (int(word) for word in states["mlx.key"])
            mx.random.seed((high << 32) | low)

    def _memory_by_part(self) -> MemoryByPart:
        weights = sum(array.nbytes for _, array in flat(self._model.parameters())) + self._weights.kept_bytes
        gradients = 4 * sum(array.size for array in self._weights.computed.values()) if self.slots else 0
        return MemoryByPart(weights, gradients, sum(p.nbytes for slot in self._moments.values() for p in slot.values()))


def _grouped(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return parameters that are added and updated together, the largest first: one, or several of so many values."""
    groups: list[list[str]] = []
    filled = most
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if filled + sizes[name] > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    return groups


def _choose_device(wanted: str, where: str) -> None:
    if wanted == "cpu":
        mx.set_default_device(mx.Device(mx.cpu))
    elif wanted != "auto":
        if wanted != "gpu" or mx.device_count(mx.gpu) == 0:
            raise InvalidInputError(f"{where}: nodes.device", f"MLX has no device {wanted!r} on this machine")
        mx.set_default_device(mx.Device(mx.gpu))


def _places(model: Any, adapter: Lora | None) -> dict[str, Place]:
    """Return where the model holds each trained parameter, by its stored name, names ascending; an adapter is
    attached."""
    if adapter is not None:
        return dict(sorted(mlx_lora.attach(model, adapter).items()))
    return {name: Place(name, transposed=False) for name, _ in sorted(flat(model.trainable_parameters()))}


def _turned(array: Any, place: Place) -> Any:
    """Turn an array between the model's layout and the stored one."""
    return array.T if place.transposed else array
