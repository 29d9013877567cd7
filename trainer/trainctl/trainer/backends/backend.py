"""The backend interface: what a rank needs from an array library.

A backend holds one model: master weights and AdamW moments in float32, a compute copy where the run's dtype is lower,
and float32 gradient accumulators. With an adapter only its matrices are trained, and computed in float32; the model's
own weights are frozen and held in the run's dtype. A micro-batch's gradient reaches the accumulators whole or not at
all, so one that failed or was fenced half-way leaves no trace.

torch and MLX differ in pairs of files that have the same interface:

    Backend, here         torch_backend.py, mlx_backend.py: the abstract methods, and in torch's also `_evaluating` and
                          `is_out_of_memory`. torch computes at once, adds a gradient whole, and writes to weights and
                          moments in place. MLX builds a graph, adds and updates group by group, and never writes to an
                          array that something else refers to
    Device, here          torch_device.py (CPU, CUDA, MPS), mlx_backend.py:MlxDevice: queue, memory, host's arrays
    Passes, passes.py     torch_passes.py, mlx_passes.py: forward passes, the probe, answers; torch_loss.py, mlx_loss.py
    AdamW                 torch_adamw.py has torch's fused one and bitsandbytes'; mlx_backend.py:_adamw writes it out
    compiling             torch_compile.py alone
    models, adapters      model/torch_*.py, model/mlx_model.py; adapters/torch_lora.py, adapters/mlx_lora.py
    which one, its model  load.py; profiles: profiling/recorders.py; drawing a token's number: step/sampler.py

AdamW (Loshchilov and Hutter 2019; bias correction as in Kingma and Ba 2015), the same in both backends. With
gradient g, update count t from 1, learning rate a, decay w (of what `is_decayed`), all elementwise and in this
order:

    p  = p * (1 - a w)
    m  = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    p  = p - (a / (1 - b1^t)) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
"""

import gc
import math
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable, OptimizerTable, RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.backends.memory import DeviceMemory, MemoryByPart
from trainctl.trainer.backends.passes import Array, Decoding, Passes, ProbePass
from trainctl.trainer.common.errors import DeviceMemoryError, first_line
from trainctl.trainer.data.batch import Batch
from trainctl.trainer.objectives.objective import Objective, Sums

BackendName = Literal["torch", "mlx"]
SlotName = str
"""The name of a set of float32 arrays, one for each trained parameter: "accumulators", "weights", or one of
`Backend.slots`."""
ADAMW_SLOTS: Final = ("exp_avg", "exp_avg_sq")
"""Moments that AdamW keeps for each parameter, by torch's names: the first and the second of its gradient."""
_MAX_SURE_NORM = 1e18
"""Norm below which no square has overflowed float32."""
_SMALL = 2.0**-100
"""Factor that makes the square of every finite float32 finite, and doesn't turn those with a norm of `_MAX_SURE_NORM`
to zero."""


@dataclass
class CompileMeter:
    """The time that a model's compiler has taken so far, and the pieces of code that it made: 0 without one."""

    seconds: float = 0.0
    graphs: int = 0


@dataclass
class State:
    """Everything an update reads or writes, under Hugging Face names."""

    weights: dict[str, Array]
    slots: dict[str, dict[str, Array]]  # the optimizer's, by the slot's name
    updates: int  # AdamW's t: skipped steps do not count
    random: dict[str, NDArray[Any]] = field(default_factory=dict)  # generators' states, the library's name first
    constants: dict[str, Array] = field(default_factory=dict)  # that the model's files have beside trained weights


@dataclass(frozen=True)
class TrainingRecipe:
    """The parts of a backend beside its model."""

    objective: Objective
    optimizer: OptimizerTable | None  # None: nothing is trained, and the backend holds weights alone
    adapter: Lora | None = None  # what is trained in place of the model's own weights
    limit_bytes: int | None = None  # that it may take on its device

    @property
    def trains_all_weights(self) -> bool:
        """Return whether the model's own weights are trained: then the optimizer updates float32 masters of them."""
        return self.adapter is None and self.optimizer is not None

    def weights_in(self, dtype: str) -> str:
        """Return the form of the trained weights of a model that computes in `dtype`, in words."""
        if self.adapter is not None:
            return "float32 adapters"
        return dtype if self.optimizer is None else "float32"


class Device:
    """The device of a backend as a whole. This one is a CPU: its memory is the host's, and its work is done when a call
    returns."""

    has_own_memory = False

    def __init__(self, name: str, memory: DeviceMemory) -> None:
        """`name`: such as "cpu", "cuda:0 NVIDIA H200" or "gpu Apple M2 Ultra"."""
        self.name, self.memory = name, memory

    def wait(self) -> None:
        """Wait until the device has done all its work."""

    def mark(self) -> Any:
        """Return the place in the device's queue up to which work has been handed over, with `elapsed_time` to a later
        one in milliseconds; None where that is done when a call returns."""
        return None

    def end_pass(self, *, backward: bool) -> None:
        """Note a forward or backward pass, while what it took is held."""
        self.memory.sample()

    def pin(self, flat: Array) -> None:
        """Speed up copies to and from this memory, which every step makes, until the array is freed; where the device
        gains nothing by that, it does nothing. Takes about as long as a few copies. Main thread."""

    def host_arrays(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Array] | None:
        """Return arrays with any contents, to copy a slot into again and again by `Backend.copy_out`; None where it
        needs none."""
        return {name: np.empty(shape, np.float32) for name, shape in shapes.items()}

    def free_cache(self) -> None:
        """Give memory that is kept unused back to the device."""
        gc.collect()  # a graph may hang in reference cycles of the model's outputs


MakePhase = Callable[[str], AbstractContextManager[object]]


def _untimed(name: str) -> AbstractContextManager[object]:
    return nullcontext()


def is_decayed(shape: Sequence[int]) -> bool:
    """Return whether weight decay applies to a parameter: to matrices, embeddings too, and not to norms and biases."""
    return len(shape) >= 2


class Backend(ABC):
    """One model on one device, used by one thread.

    What a forward pass gives stays on the device until `sums` reads all of a step's at once. Weights, accumulators and
    the optimizer's slots are copied straight between the device and the arrays that the caller brings, so a buffer
    shared with another process costs one copy each way.
    """

    name: BackendName
    recipe: TrainingRecipe
    slots: tuple[str, ...]  # of the optimizer: late ranks get them and checkpoints have them, as weights
    shapes: Mapping[str, tuple[int, ...]]  # of each trainable parameter by Hugging Face name, names ascending
    out_of_memory_words: tuple[str, ...]  # what the library's errors say, in lower case, where memory ran out
    updates: int  # AdamW's t: how often `update` was called in the life of the state
    compile_meter = CompileMeter()  # of the model's compiler: of one that compiles, its own
    device: Device
    memory_by_part: MemoryByPart  # that is held in every step
    passes: Passes

    @classmethod
    @abstractmethod
    def open(cls, config: RunFile, node: NodeTable, recipe: TrainingRecipe, where: str) -> "Backend":
        """Return the model of a run file on the node's device, without `init` having been applied. Raises
        InvalidInputError naming the field at fault, and the library's own errors where memory runs out."""

    @property
    @abstractmethod
    def compute(self) -> Compute:
        """Settings of the computation, as resolved."""

    def loss_and_gradient(
        self,
        batch: Batch,
        scales: Mapping[str, float],
        *,
        adding: AbstractContextManager[object] | None,
        phase: MakePhase = _untimed,
    ) -> None:
        """Take a micro-batch forward and backward, differentiating the objective's losses times `scales`, by the names
        of their weights. Within `adding` the gradient is added to the float32 accumulators, and the sums to those
        before: all of it, or nothing if `adding` raises. None: nothing is added. `phase` is entered with "forward" and
        "backward". Raises DeviceMemoryError, then with nothing added."""
        try:
            self._pass(batch, scales, adding, phase)
        except (RuntimeError, MemoryError) as error:
            raise self._explained(error) from None

    def clear(self) -> None:
        """Zero the accumulators, and what `sums` reads."""
        self._added: list[list[Any]] = []  # the numbers of each micro-batch's sums
        self._clear()

    def sums(self) -> Sums:
        """Return the sums of all micro-batches since `clear`; waits for the device."""
        numbers = self.passes.numbers([number for added in self._added for number in added])
        return self.recipe.objective.named(np.array(numbers, np.float64))

    def gradient_norm(self) -> float:
        """Return the Euclidean norm over all accumulators; finite if, and only if, every element is."""
        norm = self._norm(1.0)
        is_sure = norm < _MAX_SURE_NORM or math.isnan(norm)  # else squares may have overflowed
        return norm if is_sure else self._norm(_SMALL) / _SMALL

    @abstractmethod
    def update(self, learning_rate: float, factor: float) -> None:
        """Run AdamW with the accumulators times `factor` as gradient; what they hold is undefined afterwards."""

    def evaluate(self, batch: Batch) -> Sums:
        """Return the objective's sums over `batch`, those of evaluations among its metrics, without dropout and without
        a gradient; the rewards are a NumPy array. Raises DeviceMemoryError."""
        objective, passes = self.recipe.objective, self.passes
        with self._evaluating():
            outputs = passes.outputs(batch)
            sums = objective.sums(outputs)
            numbers = passes.numbers(objective.numbers(sums))  # before the others: their memory is free again
            usual = objective.named(np.array(numbers, np.float64))
            others = objective.held_out_sums(outputs)
            metrics = dict(zip(others, passes.numbers([*others.values()]), strict=True))
            rewards = None if sums.rewards is None else passes.on_host(sums.rewards)
            return Sums(usual.losses, {**usual.metrics, **metrics}, rewards)

    def token_log_probabilities(self, batch: Batch, *, reference: bool = False) -> Array:
        """Return the natural logarithms [B, T] of the probabilities of the counted targets, 0 elsewhere; as `evaluate`.
        `reference`: by the base model, with the adapter off. Without an adapter, that is the model itself as long as
        nothing has been trained. Raises DeviceMemoryError."""
        with self._evaluating(), self.passes.without_adapter() if reference else nullcontext():
            losses: Array = self.passes.on_host(self.passes.outputs(batch).losses())
            return -losses

    def probe(self, batch: Batch, flips: int) -> ProbePass:
        """Run the model in float32, whatever the run's data type, on the weights as they are. `flips`: bits of each
        linear layer's input that are flipped; 0: none. Raises DeviceMemoryError."""
        passes = self.passes
        with self._evaluating(), passes.probing(flips) as layers:
            vocabulary = passes.outputs(batch).vocabulary(with_reference=False)
            pieces = ((passes.on_host(piece.logits), passes.on_host(piece.targets)) for piece in vocabulary)
            return ProbePass.of(batch, pieces, layers)

    def generate(
        self, prompt: Sequence[int], how: Decoding, ends: Collection[int], on_token: Callable[[], None]
    ) -> list[int]:
        """Return the tokens that follow `prompt`, or that answer it if the model has an encoder, up to one of `ends` or
        as many as `how` allows; `on_token` is called after each. By random numbers of its own: those of training stay
        as they are. Raises DeviceMemoryError, what `on_token` does, and what the library does."""
        before = self._random_state()
        try:
            with self._evaluating():
                self._seed(how.seed)
                return self.passes.generate(prompt, how, ends, on_token)
        finally:
            self._restore_random(before)

    def weight_norms(self) -> Array:
        """Return the Euclidean norm of each trainable parameter, as the forward pass takes it, in the order of
        `shapes`. Summed in float64: libraries that sum millions of squares in float32 differ by 2e-3."""
        return np.array([np.sqrt(np.sum(np.square(rows, dtype=np.float64))) for rows in self._row_norms()], np.float32)

    @abstractmethod
    def copy_out(self, slot: SlotName, arrays: Mapping[str, Array] | None = None) -> Mapping[str, Array]:
        """Write a slot into float32 arrays of the model's names and shapes, and return them. None: into new ones; a
        library that never writes to its arrays gives those, without a copy."""

    @abstractmethod
    def copy_in(self, slot: SlotName, arrays: Mapping[str, Array]) -> None:
        """Replace a slot by what float32 arrays of the model's names and shapes hold. On a CPU, torch takes those of
        "accumulators" as its own: `update` writes to them, and the caller leaves them alone until `clear`."""

    def export_state(self, copy: Callable[[SlotName], Mapping[str, Array]] | None = None) -> State:
        """Return the state, its weights and slots by `copy`, or else by `copy_out`."""
        copy = copy or self.copy_out
        slots = {slot: {**copy(slot)} for slot in self.slots}
        return State({**copy("weights")}, slots, self.updates, self._random_state(), self._constants())

    def import_state(self, state: State) -> None:
        """Take over what `export_state` gave, of either backend; constants, which may be among the weights, are the
        model's. Raises InvalidInputError if names or shapes differ."""
        constants = self._constants()
        weights = {name: array for name, array in state.weights.items() if name not in constants}
        _check_state(replace(state, weights=weights), self.slots, self.shapes, "checkpoint")
        self.copy_in("weights", weights)
        for slot in self.slots:
            self.copy_in(slot, state.slots[slot])
        self.updates = state.updates
        self._restore_random(state.random)

    @classmethod
    def is_out_of_memory(cls, error: BaseException) -> bool:
        """Return whether an error is one of the library's that say so."""
        return isinstance(error, MemoryError) or any(words in str(error).lower() for words in cls.out_of_memory_words)

    # ------------------------------------ each library's own, as are `open`, `compute`, `update`, `copy_out`, `copy_in`

    @abstractmethod
    def _pass(
        self,
        batch: Batch,
        scales: Mapping[str, float],
        adding: AbstractContextManager[object] | None,
        phase: MakePhase,
    ) -> None:
        """Do what `loss_and_gradient` says. What takes memory is in local names alone, which are gone when a lack of
        memory is handled."""

    @abstractmethod
    def _clear(self) -> None: ...

    @abstractmethod
    def _norm(self, scale: float) -> float:
        """Return the Euclidean norm of the accumulators times `scale`, in float32. Other scales than 1 take memory for
        one parameter at a time."""

    @abstractmethod
    def _row_norms(self) -> Iterator[Array]:
        """Yield the norms over the last axis of each trainable parameter, in the order of `shapes`."""

    @abstractmethod
    def _constants(self) -> dict[str, Array]:
        """Return what the files of the whole model have beside trained weights, by stored name; {} with an adapter."""

    @abstractmethod
    def _seed(self, seed: int) -> None: ...

    @abstractmethod
    def _random_state(self) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None: ...

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.passes.model.eval()
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            raise self._explained(error) from None
        finally:
            self.passes.model.train()

    def _explained(self, error: RuntimeError | MemoryError) -> Exception:
        """Return DeviceMemoryError for an error by which a library says that memory ran out, after what the pass held
        is free again. This can't help if the process is killed instead."""
        if not self.is_out_of_memory(error):
            return error
        traceback.clear_frames(error.__traceback__)  # which hold the graph
        self.device.free_cache()
        return DeviceMemoryError(first_line(error))


def _check_state(state: State, slots: Iterable[str], shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Raise InvalidInputError naming the first weight or value of `slots` that isn't exactly as in `shapes`."""
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
