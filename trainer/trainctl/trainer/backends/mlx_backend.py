"""The backend on MLX, for Apple GPUs and CPUs: any causal model of mlx-lm that keeps its Hugging Face names.

MLX is lazy and differentiates by building one graph. `forward` builds it, tracing included, and evaluates the loss,
which keeps the activations that the gradient needs; `backward` evaluates the gradient. What a primitive recomputes
for its gradient counts as backward. AdamW is written out here (see base.py) because mlx.optimizers takes its
bias corrections from float32 powers, off by 1.3e-5 at beta2 = 0.999, and counts its steps per optimizer.
"""

import functools
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_unflatten
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters import mlx_lora
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.adapters.mlx_lora import Place
from trainctl.trainer.attention.mlx_document_mask import DocumentMask
from trainctl.trainer.backends import mlx_generation
from trainctl.trainer.backends.activation_checkpointing import checkpoint_mlx
from trainctl.trainer.backends.base import (
    ADAMW_SLOTS,
    NO_REFERENCE,
    SUREST,
    VOCABULARY_FLOATS,
    Array,
    Backend,
    BackendName,
    BatchOutputs,
    Decoding,
    FixedParts,
    Functions,
    Memory,
    Part,
    Parts,
    ProbePass,
)
from trainctl.trainer.backends.chunked_loss import MlxChunks, chunking_of
from trainctl.trainer.backends.host_memory import HostMemory
from trainctl.trainer.backends.mlx_model import flat, read_model, set_dtype
from trainctl.trainer.backends.mlx_probe import probing
from trainctl.trainer.backends.mlx_weights import Arrays, MlxWeights
from trainctl.trainer.common.libraries import versions_in_use
from trainctl.trainer.common.logs import log
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Sums, Vocabulary

_PIECE_VALUES = 1 << 22
"""Values of a parameter updated at a time."""
_GROUP_VALUES = 1 << 22
"""Values added or updated at a time, or those of one parameter: new arrays beside old ones take 16 MiB each."""


class MlxBackend(Backend):
    """`model` is an mlx-lm model, its parameters in any float type; `adapter` is attached to it here."""

    name: BackendName = "mlx"
    out_of_memory_words = ("malloc", "out of memory", "insufficient memory", "unable to allocate", "bad_alloc")

    def __init__(self, model: Any, parts: Parts, *, dtype: Any = mx.float32) -> None:
        self._model, self.parts = model, parts
        self.chunks: MlxChunks | None = None
        adapter = parts.adapter
        self._dtype = dtype
        self._host = HostMemory(parts.limit_bytes) if self.device == "cpu" else None  # a GPU's allocator keeps its own
        if adapter is not None:
            set_dtype(model, dtype)
        self._places = _places(model, adapter)
        held = dict(flat(model.trainable_parameters()))
        held_in = dtype if adapter is None and parts.optimizer is None else mx.float32
        weights = {name: held[place.name].astype(held_in) for name, place in self._places.items()}
        in_16_bits = adapter is None and parts.optimizer is not None and dtype != mx.float32
        self._weights = MlxWeights(weights, dtype if in_16_bits else None)
        self.shapes = {name: _turned(p, self._places[name]).shape for name, p in self._weights.computed.items()}
        self._groups = _grouped({name: p.size for name, p in self._weights.computed.items()})
        self.slots = () if parts.optimizer is None else ADAMW_SLOTS
        self._slots: dict[str, Arrays] = {slot: self._zeros() for slot in self.slots}
        self._totals: Arrays = {}  # empty: zeros
        self.updates = 0
        self._scratch: Arrays = {}
        self._sums: list[Any] = []  # of the last forward
        self._added: list[list[Any]] = []  # of each micro-batch since `clear`
        self._differentiate: Callable[..., Any] = mx.value_and_grad(self._scaled_loss)
        mx.eval(self._weights.computed, self._weights.masters, self._slots)
        model.train()
        self._publish()

    @classmethod
    def open(cls, config: RunFile, node: NodeTable, parts: Parts, where: str) -> "MlxBackend":
        if config.model.attention != "auto":
            problem = f'"{config.model.attention}" needs torch on an NVIDIA GPU, and this rank is on MLX'
            raise InvalidInputError(f"{where}: model.attention", f'{problem}; set attention = "auto"')
        _choose_device(node.device, where)
        mx.random.seed(config.run.seed)
        if parts.limit_bytes:
            mx.set_memory_limit(parts.limit_bytes)
        path, stored = Path(config.model.path), config.model.init == "pretrained"
        model = read_model(path, where, config.data.sequence_length, with_weights=stored)
        checkpoint_mlx(model, config.model.gradient_checkpointing, where)
        if config.model.compile != "off":
            log.warning("[model] compile has no effect on MLX")
        return cls(model, parts, dtype=getattr(mx, config.model.computed))

    def chunk_losses(self, config: RunFile, where: str) -> None:
        self.chunks = MlxChunks(self._model, chunking_of(config, self.memory(), of_host=True), where)

    @property
    def device(self) -> str:
        kind = "gpu" if mx.default_device() == mx.Device(mx.gpu) else "cpu"
        return f"gpu {mx.device_info().get('device_name', '')}".strip() if kind == "gpu" else "cpu"

    def forward(self, batch: Batch, *scales: float) -> None:
        with self._memory_errors():
            try:
                (_, self._sums), self._scratch = self._differentiate(self._weights.computed, batch, scales)
            finally:
                self._publish()  # tracing left its own arrays in the model
            mx.eval(self._sums)
            self._sample()  # while what backward needs is held

    def backward(self) -> None:
        with self._memory_errors():
            mx.eval(self._scratch)
            self._sample()

    def accumulate(self) -> None:
        """The largest group first: if memory suffices for it, it does for the others. Once one has been added, the
        micro-batch can't be repeated: too little memory for a later one ends the rank."""
        first, *others = self._groups
        with self._memory_errors():
            self._add(first)
        for names in others:
            self._add(names)
        self._scratch = {}
        self._added.append(self._sums)

    def _add(self, names: list[str]) -> None:
        sums = {name: _sum(self._totals.get(name), self._scratch[name]) for name in names}
        mx.eval(sums)
        self._totals |= sums
        self._scratch |= dict.fromkeys(names)

    def forget(self) -> None:
        self._scratch, self._sums = {}, []

    def discard(self) -> None:
        self.forget()
        mx.clear_cache()

    def clear(self) -> None:
        self._totals, self._added = {}, []

    def _read(self, with_norm: bool) -> tuple[list[list[float]], float | None]:
        """What was evaluated with its micro-batch; the norm is not."""
        return [[float(number.item()) for number in row] for row in self._added], None

    def _norm(self, scale: float) -> float:
        totals = self._gradients()
        squares: Arrays = {}
        for names in self._groups:
            squares |= {name: mx.sum(mx.square(totals[name] if scale == 1 else totals[name] * scale)) for name in names}
            mx.eval(squares)
        total: Any = mx.sum(mx.stack([squares[name] for name in totals]))
        return math.sqrt(float(total.item()))

    def update(self, learning_rate: float, factor: float) -> None:
        self.updates += 1
        totals = self._gradients()
        first, second = (self._slots[slot] for slot in ADAMW_SLOTS)
        for names in self._groups:
            for name in names:
                state = self._weights.masters[name], totals[name], first[name], second[name]
                values, first[name], second[name] = self._updated(state, factor, learning_rate)
                self._weights.store(name, values)
            new = {name: self._weights.computed[name] for name in names}
            self._model.update(self._tree(new))  # before they are computed: old arrays can be reused
            mx.eval(self._weights.computed, self._weights.masters, self._slots)

    def evaluate(self, batch: Batch) -> Sums:
        with self._evaluating():
            outputs = self._outputs(batch)
            sums = self.parts.objective.sums(outputs)
            mx.eval(sums.numbers())
            more = self.parts.objective.held_out_sums(outputs)
            found = [*sums.numbers(), *more.values()]
            mx.eval(found)
            rewards = None if sums.rewards is None else np.array(sums.rewards)
            return self.parts.objective.evaluated([float(number.item()) for number in found], [*more], rewards)

    def token_log_probabilities(self, batch: Batch) -> Array:
        with self._evaluating():
            return -np.array(self._losses(batch, None, "none"))

    def probe(self, batch: Batch, flips: int) -> ProbePass:
        with self._evaluating(), probing(self._model, flips) as layers:
            vocabulary = self._vocabulary(batch, with_reference=False)
            pieces = ((np.array(piece.logits), np.array(piece.targets)) for piece in vocabulary)
            return ProbePass.of(batch, pieces, layers)

    def reference_log_probabilities(self, batch: Batch) -> Array:
        with self._without_adapter():
            return self.token_log_probabilities(batch)

    def _row_norms(self) -> Iterator[Array]:
        held = dict(flat(self._model.trainable_parameters()))
        for place in self._places.values():
            yield np.array(mx.linalg.norm(held[place.name].astype(mx.float32), axis=-1))

    @property
    def compute(self) -> Compute:
        tf32 = None if self.device == "cpu" else os.environ.get("MLX_ENABLE_TF32") != "0"
        dtype = str(self._dtype).removeprefix("mlx.core.")
        return Compute(
            dtype,
            tf32,
            attention="mx.fast",
            weights=self.parts.weights_in(dtype),
            versions=versions_in_use(self.device),
        )

    def reset_peak(self) -> None:
        if self._host is not None:
            self._host.reset()
        else:
            mx.reset_peak_memory()

    def _fixed_parts(self) -> FixedParts:
        weights = sum(array.nbytes for _, array in flat(self._model.parameters())) + self._weights.kept_bytes
        gradients = 4 * sum(array.size for array in self._weights.computed.values()) if self.slots else 0
        return FixedParts(weights, gradients, sum(p.nbytes for slot in self._slots.values() for p in slot.values()))

    def _sample(self) -> None:
        if self._host is not None:
            self._host.sample()

    def memory(self) -> Memory:
        """Of the allocator on a GPU; on a CPU, where both are the machine's, what the process holds, as torch's is."""
        if self._host is not None:
            return self._host.read()
        device: dict[str, Any] = mx.device_info()
        cap = self.parts.limit_bytes or device.get("max_recommended_working_set_size") or mx.get_memory_limit()
        used = mx.get_active_memory()
        peak = max(used, mx.get_peak_memory())  # a reset peak is 0 until something is allocated
        return Memory(used, peak, cap, mx.get_cache_memory())

    def copy_out(self, part: Part, arrays: Mapping[str, Array]) -> None:
        for name, array in self._part(part).items():
            np.copyto(arrays[name], self._on_host(name, array))

    def unchanging_arrays(self, part: Part) -> dict[str, Array]:
        """MLX never writes to an array that something else refers to."""
        return {name: self._on_host(name, array) for name, array in self._part(part).items()}

    def _on_host(self, name: str, array: Any) -> Array:
        """In float32, as stored: the array's own memory, which the CPU can read."""
        stored: Array = _turned(np.asarray(array.astype(mx.float32)), self._places[name])
        return stored

    def copy_in(self, part: Part, arrays: Mapping[str, Array]) -> None:
        given = {name: mx.array(_turned(arrays[name], self._places[name])) for name in self.shapes}
        mx.eval(given)
        if part != "weights":
            self._part(part).update(given)
            return
        for name, array in given.items():
            self._weights.store(name, array)
        mx.eval(self._weights.computed, self._weights.masters)
        self._publish()

    def _part(self, part: Part) -> Arrays:
        match part:
            case "accumulators":
                return self._gradients()
            case "weights":
                return dict(self._weights.masters)
            case _:
                return self._slots[part]

    def _gradients(self) -> Arrays:
        if not self._totals:
            self._totals = self._zeros()
            mx.eval(self._totals)
        return self._totals

    def _zeros(self) -> Arrays:
        return {name: mx.zeros(p.shape) for name, p in self._weights.computed.items()}

    def _seed(self, seed: int) -> None:
        mx.random.seed(seed)

    def _generated(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        return mlx_generation.generate(self._model, prompt, how, ends, on_token)

    def _constants(self) -> dict[str, Array]:
        if self.parts.adapter is not None:
            return {}
        frozen = (pair for pair in flat(self._model.parameters()) if pair[0] not in self.shapes)
        return {name: np.array(array.astype(mx.float32)) for name, array in frozen}

    def _random_state(self) -> dict[str, NDArray[Any]]:
        state: Any = mx.random.state
        return {"mlx.key": np.array(state[0])}

    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None:
        """MLX's generator state is one key of two 32-bit words, and a seed becomes the key of its high and low word."""
        if "mlx.key" in states:
            high, low = (int(word) for word in states["mlx.key"])
            mx.random.seed((high << 32) | low)

    def _updated(self, state: tuple[Any, ...], factor: float, rate: float) -> tuple[Any, Any, Any]:
        """A parameter, its accumulated gradient and moments, to a parameter and moments. A large one is updated in
        pieces: what the update computes on the way takes three times as much as the result."""
        p, g, m, v = state
        if p.size <= _PIECE_VALUES:
            return self._adamw(p, g * factor, m, v, rate)
        rows = max(1, _PIECE_VALUES * len(p) // p.size)
        made = []
        for start in range(0, len(p), rows):
            part = slice(start, start + rows)
            made.append(self._adamw(p[part], g[part] * factor, m[part], v[part], rate))
            mx.eval(made[-1])
        weights, first, second = (mx.concatenate([*pieces]) for pieces in zip(*made, strict=True))
        return weights, first, second

    def _adamw(self, p: Any, g: Any, m: Any, v: Any, rate: float) -> tuple[Any, Any, Any]:
        """One parameter's update and moments; the bias corrections are taken in double precision."""
        table = self.parts.optimizer
        assert table is not None, "loaded without an optimizer"
        b1, b2 = table.beta1, table.beta2
        if p.ndim >= 2 and table.weight_decay:
            p = p * (1 - rate * table.weight_decay)
        m = b1 * m + (1 - b1) * g
        v = b2 * v + (1 - b2) * mx.square(g)
        denominator = mx.sqrt(v) / math.sqrt(1 - b2**self.updates) + table.epsilon
        return p - (rate / (1 - b1**self.updates)) * m / denominator, m, v

    def _scaled_loss(self, weights: Arrays, batch: Batch, scales: tuple[float, ...]) -> tuple[Any, list[Any]]:
        self._model.update(self._tree(weights))
        sums = self.parts.objective.sums(self._outputs(batch))
        terms = [loss * scale for loss, scale in zip(sums.losses.values(), scales, strict=True)]
        return functools.reduce(mx.add, terms), sums.numbers()

    def _outputs(self, batch: Batch) -> BatchOutputs:
        return BatchOutputs(
            functools.partial(self._logits, batch), functools.partial(self._losses, batch),
            lambda: mx.array(batch.counted), functools.partial(self._reference_losses, batch),
            functools.partial(self._vocabulary, batch), _FUNCTIONS,
        )  # fmt: skip

    def _reference_losses(self, batch: Batch) -> Any:
        """[B, L], as computed before or with the adapter off."""
        if batch.reference is not None:
            return -mx.array(batch.reference)
        assert self.parts.adapter is not None, NO_REFERENCE
        with self._without_adapter():
            return mx.stop_gradient(self._losses(batch, None, "none"))

    def _vocabulary(self, batch: Batch, *, with_reference: bool) -> Iterator[Vocabulary]:
        """Of counted targets, as many at a time as `VOCABULARY_FLOATS` allows."""
        rows = np.flatnonzero(batch.counted)
        counted, targets = mx.array(rows), mx.array(batch.targets.ravel()[rows])
        own, head = self._before_head(batch, counted)
        other, adapter = None, self.parts.adapter if with_reference else None
        if adapter is not None:
            with mlx_lora.disabled(self._model, adapter):
                other, _ = self._before_head(batch, counted)
        size = max(1, VOCABULARY_FLOATS // head(own[:1]).shape[-1])
        for start in range(0, len(rows), size):
            part = slice(start, start + size)
            logits, reference = head(own[part]).astype(mx.float32), None
            if adapter is not None and other is not None:
                with mlx_lora.disabled(self._model, adapter):
                    reference = head(other[part]).astype(mx.float32)
            mx.eval(logits, reference)
            yield Vocabulary(logits, reference, targets[part])

    def _before_head(self, batch: Batch, rows: Any) -> tuple[Any, Callable[[Any], Any]]:
        """The last hidden states of some of the batch's targets and what makes logits of them; of a model whose head
        can't be told from its body, the logits."""
        inputs, caches = mx.array(batch.inputs), self._caches(batch)
        if self.chunks is not None and self.chunks.is_possible:
            hidden = self.chunks.hidden(inputs, caches)[rows]
            mx.eval(hidden)  # while the adapter is as it is
            return hidden, self.chunks.logits
        logits = self._model(inputs, cache=caches).flatten(0, 1)[rows]
        mx.eval(logits)
        return logits, lambda found: found

    def _without_adapter(self) -> AbstractContextManager[object]:
        adapter = self.parts.adapter
        return nullcontext() if adapter is None else mlx_lora.disabled(self._model, adapter)

    def _logits(self, batch: Batch) -> Any:
        return self._model(mx.array(batch.inputs), cache=self._caches(batch)).astype(mx.float32)

    def _losses(self, batch: Batch, logits: Any, reduction: Literal["none", "sum"], *, every: bool = False) -> Any:
        """[B, L] losses ("none") or their sum ("sum"), from logits where there are some already; of counted targets, or
        of `every` one."""
        targets, counted = mx.array(batch.targets), mx.array(batch.every_target if every else batch.counted)
        if logits is None and self.chunks is not None and (size := self.chunks.chunk_tokens(targets.size)):
            inputs, caches = mx.array(batch.inputs), self._caches(batch)
            losses = self.chunks.token_losses(inputs, targets, size, caches).reshape(targets.shape) * counted
            return losses.sum() if reduction == "sum" else losses
        found = self._logits(batch) if logits is None else logits
        return nn.losses.cross_entropy(found, targets, weights=counted, reduction=reduction)

    def _caches(self, batch: Batch) -> list[DocumentMask] | None:
        """What keeps a pack's documents apart; the keys of dropout are set on the way."""
        if self.parts.adapter is not None:
            self.parts.adapter.token_keys.value = None if batch.keys is None else mx.array(batch.keys)
        if batch.positions is None:
            return None
        return [DocumentMask(mx.array(batch.positions), self._model)] * len(self._model.layers)

    def _publish(self) -> None:
        self._model.update(self._tree(self._weights.computed))
        mx.eval(self._model.parameters())

    def _tree(self, weights: Arrays) -> Any:
        """The model's trainable part."""
        return tree_unflatten([(self._places[name].name, p) for name, p in weights.items()])


def _grouped(sizes: Mapping[str, int]) -> list[list[str]]:
    """Parameters that are added and updated together, the largest first."""
    groups: list[list[str]] = []
    filled = _GROUP_VALUES
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        if filled + sizes[name] > _GROUP_VALUES:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += sizes[name]
    return groups


def _sum(total: Any, gradient: Any) -> Any:
    return gradient.astype(mx.float32) if total is None else total + gradient


def _choose_device(wanted: str, where: str) -> None:
    if wanted == "cpu":
        mx.set_default_device(mx.Device(mx.cpu))
    elif wanted != "auto":
        if wanted != "gpu" or mx.device_count(mx.gpu) == 0:
            raise InvalidInputError(f"{where}: nodes.device", f"MLX has no device {wanted!r} on this machine")
        mx.set_default_device(mx.Device(mx.gpu))


def _places(model: Any, adapter: Lora | None) -> dict[str, Place]:
    """Where the model holds each trained parameter, by its stored name, names ascending; an adapter is attached."""
    if adapter is not None:
        return dict(sorted(mlx_lora.attach(model, adapter).items()))
    return {name: Place(name, transposed=False) for name, _ in sorted(flat(model.trainable_parameters()))}


def _log_sigmoid(x: Any) -> Any:
    return -mx.logaddexp(mx.array(0.0), -x)


def _log_odds(x: Any) -> Any:
    x = mx.minimum(x, SUREST)
    return x - mx.log(-mx.expm1(x))


def _turned(array: Any, place: Place) -> Any:
    """Between the model's layout and the stored one."""
    return array.T if place.transposed else array


_FUNCTIONS = Functions(_log_sigmoid, _log_odds)
