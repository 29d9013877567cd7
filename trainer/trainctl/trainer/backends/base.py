"""The backend interface: what a rank needs from an array library.

A backend holds one model: master weights and AdamW moments in float32, a compute copy where the run's dtype is lower,
float32 gradient accumulators, and a scratch for the one micro-batch in flight. With an adapter only its matrices are
trained, and computed in float32; the model's own weights are frozen and held in the run's dtype. Nothing reaches the
accumulators but by `accumulate`, so a micro-batch that failed or was fenced half-way leaves no trace.

AdamW (Loshchilov and Hutter 2019; bias correction as in Kingma and Ba 2015), the same in both backends. With
gradient g, update count t from 1, learning rate a, decay w (matrices only: ndim >= 2), all elementwise and in this
order:

    p  = p * (1 - a w)
    m  = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    p  = p - (a / (1 - b1^t)) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable, OptimizerTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.common.errors import DeviceMemoryError, first_line
from trainctl.trainer.data.batch import Batch, Tokens
from trainctl.trainer.objectives.objective import Objective, Outputs, Sums, Vocabulary

Array = NDArray[np.float32]
BackendName = Literal["torch", "mlx"]
Part = str
"""Of a backend, one float32 value for each trained scalar: "accumulators", "weights", or a slot of its optimizer."""
ADAMW_SLOTS: Final = ("exp_avg", "exp_avg_sq")
"""What AdamW keeps of each parameter, by torch's names: the first and second moments of its gradient."""
_SURE_NORM = 1e18
"""Norm below which no square has overflowed float32."""
_SMALL = 2.0**-100
"""Factor that makes the square of every finite float32 finite, and doesn't turn those with a norm of `_SURE_NORM` to
zero."""
VOCABULARY_FLOATS: Final = 1 << 24
"""Most logits of one piece of `Outputs.vocabulary`: 64 MiB."""
NO_REFERENCE: Final = "the model has no adapter, and the batch has no reference log-probabilities"
SUREST: Final = -1e-7
"""Log-probability above which the odds of an answer no longer grow: those of one that is certain are infinite."""


@dataclass
class CompileMeter:
    """The time that a model's compiler has taken so far, and the pieces of code that it made: 0 without one."""

    seconds: float = 0.0
    graphs: int = 0


@dataclass(frozen=True)
class Memory:
    """What the trainer holds on its device, in bytes; None where it cannot be known."""

    used_bytes: int | None = None
    peak_bytes: int | None = None  # since `reset_peak`
    cap_bytes: int | None = None
    cache_bytes: int | None = None  # kept by the allocator, and used by no array

    @functools.cached_property
    def values(self) -> dict[str, float]:
        """What is known, by the names of the metrics."""
        known = (
            ("memory_bytes", self.used_bytes),
            ("memory_peak_bytes", self.peak_bytes),
            ("memory_cap_bytes", self.cap_bytes),
            ("memory_cache_bytes", self.cache_bytes),
        )
        return {name: float(size) for name, size in known if size is not None}


class FixedParts(NamedTuple):
    """What a backend holds on its device in every step, in bytes."""

    weights: int  # with what is kept beside them, and frozen ones
    gradients: int  # the accumulators
    moments: int


class Decoding(NamedTuple):
    """How tokens are chosen."""

    max_tokens: int
    temperature: float  # 0: always the likeliest token
    top_p: float
    seed: int
    settings: Mapping[str, Any] | None = None  # of generation_config.json, where they apply too; torch only
    decoder_start: int | None = None  # token that the decoder of an encoder-decoder model begins with


@dataclass
class State:
    """Everything an update reads or writes, under Hugging Face names."""

    weights: dict[str, Array]
    slots: dict[str, dict[str, Array]]  # the optimizer's, by the slot's name
    updates: int  # AdamW's t: skipped steps do not count
    random: dict[str, NDArray[Any]] = field(default_factory=dict)  # generators' states, the library's name first
    constants: dict[str, Array] = field(default_factory=dict)  # that the model's files have beside trained weights


@dataclass(frozen=True)
class Parts:
    """What a backend is put together from beside its model."""

    objective: Objective
    optimizer: OptimizerTable | None  # None: nothing is trained, and the backend holds weights alone
    adapter: Lora | None = None  # what is trained in place of the model's own weights
    limit_bytes: int | None = None  # that it may take on its device

    def weights_in(self, dtype: str) -> str:
        """The form of the trained weights of a model that computes in `dtype`, in words."""
        if self.adapter is not None or self.optimizer is None:
            return "float32 adapters" if self.adapter is not None else dtype
        return "float32"


@dataclass(frozen=True)
class ProbePass:
    """One forward pass of the probe."""

    log_probabilities: Array  # [targets] of the counted targets, nats
    layers: Array  # [layers, targets], by `layer_values`

    @classmethod
    def of(cls, batch: Batch, pieces: Iterable[tuple[Array, Tokens]], layers: Sequence[Array]) -> "ProbePass":
        """Put a pass together from pieces of the counted targets' logits [n, V] with the targets [n], and the values
        [B, L] of each layer, of which some models have none. The logarithms are taken in float64: libraries that sum
        50,000 exponentials in float32 differ by 2e-4."""
        log_probabilities = list[np.float32]()
        for logits, targets in pieces:
            for row, target in zip(logits, targets, strict=True):
                wide = row.astype(np.float64) - row.max()
                log_probabilities.append(np.float32(wide[target] - np.log(np.exp(wide).sum())))
        counted = batch.counted > 0
        empty = np.empty((0, int(counted.sum())), np.float32)
        values = np.stack([layer[counted] for layer in layers]) if layers else empty
        return cls(np.array(log_probabilities, np.float32), values)


def layer_values(hidden: Array) -> Array:
    """Return one value per token of hidden states [B, L, H]: their sum, each channel with a fixed weight in (-1, 1)."""
    weights = (np.arange(1, hidden.shape[-1] + 1, dtype=np.uint64) * 0x9E3779B1 & 0xFFFFFFFF) / 2.0**31 - 1
    return (hidden @ weights).astype(np.float32)


class Totals(NamedTuple):
    """What the micro-batches since `clear` came to."""

    sums: Sums
    norm: float | None  # of the accumulators, if it was asked for


class Backend(ABC):
    """One model on one device, used by one thread. Calls go forward, backward, accumulate for each micro-batch, then
    gradient_norm and update.

    What `forward` finds stays on the device until `totals` reads all of it at once, so a step waits for its device a
    single time.

    A part of it is one float32 value for each trainable scalar. Copies go straight between the device and the arrays
    that the caller brings, so a buffer shared with another process costs one copy each way.
    """

    name: BackendName
    parts: Parts
    slots: tuple[str, ...]  # of the optimizer, () without one: levelled, kept in checkpoints and resumed beside weights
    shapes: Mapping[str, tuple[int, ...]]  # of each trainable parameter by Hugging Face name, names ascending
    out_of_memory_words: tuple[str, ...]  # what the library's errors say, in lower case, where memory ran out
    updates: int  # AdamW's t: how often `update` was called in the life of the state
    compile_meter = CompileMeter()  # of the model's compiler: of one that compiles, its own
    _model: Any  # with `train()` and `eval()`
    _parts: FixedParts | None = None  # None: not loaded by `load`
    _beside = 0  # bytes that the process held as it was loaded, beside weights and moments

    @classmethod
    @abstractmethod
    def open(cls, config: RunFile, node: NodeTable, parts: Parts, where: str) -> "Backend":
        """The model of a run file on the node's device, without `init` having been applied. Raises InvalidInputError
        naming the field at fault, and the library's own errors where memory runs out."""

    @abstractmethod
    def chunk_losses(self, config: RunFile, where: str) -> None:
        """Compute the loss of some tokens at a time, as a run file asks for it. Raises InvalidInputError if the model
        doesn't allow it."""

    @property
    @abstractmethod
    def device(self) -> str:
        """Such as "cpu", "cuda:0 NVIDIA H200" or "gpu Apple M2 Ultra"."""

    @property
    @abstractmethod
    def compute(self) -> Compute:
        """How it computes, as resolved."""

    @abstractmethod
    def forward(self, batch: Batch, *scales: float) -> None:
        """The objective's sums over `batch`; `backward` will differentiate its losses times `scales`, one for each of
        its weights. Raises DeviceMemoryError."""

    @abstractmethod
    def backward(self) -> None:
        """The gradient of the last `forward` into scratch. Raises DeviceMemoryError."""

    @abstractmethod
    def accumulate(self) -> None:
        """Add the scratch to the float32 accumulators, and the sums of its `forward` to those before, and empty it; all
        of it or nothing. Raises DeviceMemoryError."""

    def totals(self, *, with_norm: bool = False) -> Totals:
        """What has been accumulated since `clear`; waits for the device, once."""
        rows, norm = self._read(with_norm)
        row = self.parts.objective.row
        numbers = (
            np.array(rows, np.float64).sum(axis=0).tolist() if rows else [0.0] * (len(row.weights) + len(row.metrics))
        )
        return Totals(self.parts.objective.named(numbers), norm)

    @abstractmethod
    def _read(self, with_norm: bool) -> tuple[list[list[float]], float | None]:
        """The numbers of each accumulated micro-batch's sums; and the norm of the accumulators, if it is wanted and can
        be had at the same time."""

    @abstractmethod
    def forget(self) -> None:
        """Empty the scratch."""

    @abstractmethod
    def discard(self) -> None:
        """Empty the scratch and give memory back to the device."""

    @abstractmethod
    def clear(self) -> None:
        """Zero the accumulators, and what `totals` reads."""

    @abstractmethod
    def copy_out(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Write a part into float32 arrays of the model's names and shapes."""

    @abstractmethod
    def copy_in(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Replace a part by what float32 arrays of the model's names and shapes hold. Those of "accumulators" may be
        kept and written to until the next `clear`."""

    @abstractmethod
    def update(self, learning_rate: float, factor: float) -> None:
        """AdamW with the accumulators times `factor` as gradient; what they hold is undefined afterwards."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> Sums:
        """The objective's sums over `batch`, those of evaluations among its metrics, without dropout and without a
        gradient; the rewards are a NumPy array. Raises DeviceMemoryError."""

    @abstractmethod
    def token_log_probabilities(self, batch: Batch) -> Array:
        """[B, L] natural logarithms of the probabilities of the counted targets, 0 elsewhere; as `evaluate`. Raises
        DeviceMemoryError."""

    @abstractmethod
    def probe(self, batch: Batch, flips: int) -> ProbePass:
        """Run the model in float32, whatever the run's data type, on the weights as they are. `flips`: bits of each
        linear layer's input that are flipped; 0: none. Raises DeviceMemoryError."""

    @abstractmethod
    def reference_log_probabilities(self, batch: Batch) -> Array:
        """As `token_log_probabilities`, by the base model: with the adapter off. Without an adapter, it is the model
        itself as long as nothing has been trained."""

    def generate(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        """The tokens that follow `prompt`, up to one of `ends` or as many as `how` allows; `on_token` is called after
        each. By random numbers of its own: those of training stay as they are. Raises DeviceMemoryError, what
        `on_token` does, and what the library does."""
        before = self._random_state()
        try:
            with self._evaluating():
                self._seed(how.seed)
                return self._generated(prompt, how, ends, on_token)
        finally:
            self._restore_random(before)

    @abstractmethod
    def reset_peak(self) -> None:
        """Begin a new peak of memory, at what is held now."""

    @abstractmethod
    def memory(self) -> Memory: ...

    @abstractmethod
    def _norm(self, scale: float) -> float:
        """Euclidean norm of the accumulators times `scale`, in float32."""

    @abstractmethod
    def _row_norms(self) -> Iterator[Array]:
        """Of each trainable parameter in the order of `shapes`: the norms over its last axis."""

    @abstractmethod
    def _constants(self) -> dict[str, Array]:
        """What the files of the whole model have beside trained weights, by stored name; {} with an adapter."""

    @abstractmethod
    def _random_state(self) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _seed(self, seed: int) -> None:
        """Begin the random numbers of `seed`."""

    @abstractmethod
    def _generated(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]: ...

    @abstractmethod
    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None: ...

    @abstractmethod
    def _fixed_parts(self) -> FixedParts: ...

    def note_loaded(self) -> None:
        """The model is whole: what the process holds beside it from here on is the libraries'."""
        self._parts = self._fixed_parts()
        used = self.memory().used_bytes or 0
        self._beside = max(0, used - self._parts.weights - self._parts.moments)

    def memory_parts(self, memory: Memory) -> dict[str, float]:
        """Bytes on the device by part, by the names of the metrics. Activations are what else the step's peak has: with
        logits, gradients in flight and the libraries' working memory."""
        if self._parts is None:
            return {}
        parts = {f"memory_{name}_bytes": float(size) for name, size in self._parts._asdict().items()}
        if memory.peak_bytes is not None:
            parts["memory_activations_bytes"] = float(max(0, memory.peak_bytes - sum(self._parts) - self._beside))
        return parts

    def wait(self) -> None:
        """Until the device has done all that it was given."""
        return

    def mark(self) -> Any:
        """The place in the device's queue up to which work has been given; None where that is done when a call
        returns."""
        return None

    def seconds_between(self, begun: Any, ended: Any) -> float:
        """The device's time between two marks that it has passed; 0 on a device without marks."""
        return 0.0

    def gradient_norm(self, found: float | None = None) -> float:
        """Euclidean norm over all accumulators; finite if, and only if, every element is. `found`: what `totals` read
        of them as they still are."""
        norm = self._norm(1.0) if found is None else found
        return norm if norm < _SURE_NORM else self._norm(_SMALL) / _SMALL

    def weight_norms(self) -> Array:
        """Euclidean norm of each trainable parameter, as the forward pass takes it, in the order of `shapes`. Summed in
        float64: libraries that sum millions of squares in float32 differ by 2e-3."""
        return np.array([np.sqrt(np.sum(np.square(rows, dtype=np.float64))) for rows in self._row_norms()], np.float32)

    def export_state(self) -> State:
        return self.state_of(self.copy_of("weights"), {slot: self.copy_of(slot) for slot in self.slots})

    def state_of(self, weights: dict[str, Array], slots: dict[str, dict[str, Array]]) -> State:
        """The state with these copies of its parts."""
        return State(weights, slots, self.updates, self._random_state(), self._constants())

    def import_state(self, state: State) -> None:
        """Take over what `export_state` gave, of either backend; constants, which may be among the weights, are the
        model's. Raises InvalidInputError if names or shapes differ."""
        constants = self._constants()
        weights = {name: array for name, array in state.weights.items() if name not in constants}
        check_state(replace(state, weights=weights), self.slots, self.shapes, "checkpoint")
        self.copy_in("weights", weights)
        for slot in self.slots:
            self.copy_in(slot, state.slots[slot])
        self.updates = state.updates
        self._restore_random(state.random)

    def unchanging_arrays(self, part: Part) -> dict[str, Array] | None:
        """A part as it is now, in arrays of main memory that no later call writes to, without a copy of those that are
        in float32. They hold their memory as long as they are kept. None: it has to be copied out."""
        return None

    def host_arrays(self) -> dict[str, Array]:
        """Arrays of the model's names and shapes, with any contents, to copy parts into again and again."""
        return {name: np.empty(shape, np.float32) for name, shape in self.shapes.items()}

    def pin(self, flat: Array) -> None:
        """Speed up copies to and from this memory, which every step makes, until the array is freed; where the device
        gains nothing by that, it does nothing. Takes about as long as a few copies. Main thread."""
        return

    def copy_of(self, part: Part) -> dict[str, Array]:
        """A part by Hugging Face name."""
        arrays = {name: np.empty(shape, np.float32) for name, shape in self.shapes.items()}
        self.copy_out(part, arrays)
        return arrays

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self._model.eval()
        try:
            with self._memory_errors():
                yield
        finally:
            self._model.train()

    @classmethod
    def is_out_of_memory(cls, error: BaseException) -> bool:
        """Whether an error is one of the library's that say so."""
        return isinstance(error, MemoryError) or any(words in str(error).lower() for words in cls.out_of_memory_words)

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Turn a library's out-of-memory errors into DeviceMemoryError, and empty the scratch. This can't help if the
        process is killed instead."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self.is_out_of_memory(error):
                raise
            text = first_line(error)
        else:
            return
        self.discard()  # outside the handler, so that the traceback's frames no longer hold the graph
        raise DeviceMemoryError(text)


class Functions(NamedTuple):
    """Those of an array library that objectives need, and that are no methods of its arrays."""

    log_sigmoid: Callable[[Any], Any]
    log_odds: Callable[[Any], Any]


class BatchOutputs(Outputs):
    """The outputs of a backend's model: logits only if they are asked for, and then for the losses too."""

    def __init__(
        self, logits: Callable[[], Any], losses: Callable[..., Any], counted: Callable[[], Any],
        reference: Callable[[], Any], vocabulary: Callable[..., Iterator[Vocabulary]], functions: "Functions",
    ) -> None:  # fmt: skip
        """`losses` are made from logits, or without, reduced by "none" or "sum"; `every`: those of all targets.
        `vocabulary` is as the method of that name."""
        self._vocabulary = vocabulary
        self._logits, self._losses, self._counted, self._found = logits, losses, counted, None
        self._reference, self._functions = reference, functions

    @property
    def logits(self) -> Any:
        if self._found is None:
            self._found = self._logits()
        return self._found

    @property
    def counted(self) -> Any:
        return self._counted()

    def token_losses(self) -> Any:
        return self._losses(self._found, "none")

    def every_loss(self) -> Any:
        return self._losses(self._found, "none", every=True)

    def loss_sum(self) -> Any:
        return self._losses(self._found, "sum")

    def reference_losses(self) -> Any:
        return self._reference()

    def vocabulary(self, *, with_reference: bool) -> Iterator[Vocabulary]:
        return self._vocabulary(with_reference=with_reference)

    def log_sigmoid(self, x: Any) -> Any:
        return self._functions.log_sigmoid(x)

    def log_odds(self, x: Any) -> Any:
        return self._functions.log_odds(x)


def check_state(state: State, slots: Iterable[str], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Whether weights and `slots` are exactly those of `shapes`. Raises InvalidInputError naming the first that
    isn't."""
    parts = {"weight": state.weights, **{f"optimizer {slot}": state.slots.get(slot, {}) for slot in slots}}
    for kind, arrays in parts.items():
        if arrays.keys() != shapes.keys():
            odd = sorted(arrays.keys() ^ shapes.keys())[0]
            raise InvalidInputError(where, f"{kind} of {odd!r} is missing from the checkpoint or the model")
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise InvalidInputError(
                    where, f"{kind} of {name!r} has shape {arrays[name].shape}, the model expects {shape}"
                )
