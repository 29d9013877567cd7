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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import Compute
from trainctl.trainer.adapters.lora import Lora
from trainctl.trainer.common.errors import DeviceMemoryError, first_line
from trainctl.trainer.data.batch import Batch

Array = NDArray[np.float32]
BackendName = Literal["torch", "mlx"]
Part = Literal["accumulators", "weights", "first_moments", "second_moments"]
STATE_PARTS: tuple[Part, ...] = ("weights", "first_moments", "second_moments")
_SURE_NORM = 1e18
"""Norm below which no square has overflowed float32."""
_SMALL = 2.0**-100
"""Factor that makes the square of every finite float32 finite, and doesn't turn those with a norm of `_SURE_NORM` to
zero."""


@dataclass(frozen=True)
class Memory:
    """What the trainer holds on its device, in bytes; None where it cannot be known."""

    used_bytes: int | None = None
    peak_bytes: int | None = None  # since `reset_peak`
    cap_bytes: int | None = None

    @functools.cached_property
    def values(self) -> dict[str, float]:
        """What is known, by the names of the metrics."""
        known = (
            ("memory_bytes", self.used_bytes),
            ("memory_peak_bytes", self.peak_bytes),
            ("memory_cap_bytes", self.cap_bytes),
        )
        return {name: float(size) for name, size in known if size is not None}


class Decoding(NamedTuple):
    """How tokens are chosen."""

    max_tokens: int
    temperature: float  # 0: always the likeliest token
    top_p: float
    seed: int


@dataclass
class State:
    """Everything an update reads or writes, under Hugging Face names."""

    weights: dict[str, Array]
    first_moments: dict[str, Array]
    second_moments: dict[str, Array]
    updates: int  # AdamW's t: skipped steps do not count
    random: dict[str, NDArray[Any]] = field(default_factory=dict)  # generators' states, the library's name first


class Backend(ABC):
    """One model on one device, used by one thread. Calls go forward, backward, accumulate for each micro-batch, then
    gradient_norm and update.

    A part of it is one float32 value for each trainable scalar. Copies go straight between the device and the arrays
    that the caller brings, so a buffer shared with another process costs one copy each way.
    """

    name: BackendName
    adapter: Lora | None  # what is trained in place of the model's own weights
    shapes: Mapping[str, tuple[int, ...]]  # of each trainable parameter by Hugging Face name, names ascending
    out_of_memory_words: tuple[str, ...]  # what the library's errors say, in lower case, where memory ran out
    updates: int  # AdamW's t: how often `update` was called in the life of the state
    _model: Any  # with `train()` and `eval()`

    @property
    @abstractmethod
    def device(self) -> str:
        """Such as "cpu", "cuda:0 NVIDIA H200" or "gpu Apple M2 Ultra"."""

    @property
    @abstractmethod
    def compute(self) -> Compute:
        """How it computes, as resolved."""

    @abstractmethod
    def forward(self, batch: Batch, scale: float) -> float:
        """The loss sum of `batch` in nats; `backward` will differentiate it times `scale`. Raises DeviceMemoryError."""

    @abstractmethod
    def backward(self) -> None:
        """The gradient of the last `forward` into scratch. Raises DeviceMemoryError."""

    @abstractmethod
    def accumulate(self) -> None:
        """Add the scratch to the float32 accumulators and empty it; all of it or nothing. Raises DeviceMemoryError."""

    @abstractmethod
    def forget(self) -> None:
        """Empty the scratch."""

    @abstractmethod
    def discard(self) -> None:
        """Empty the scratch and give memory back to the device."""

    @abstractmethod
    def clear(self) -> None:
        """Zero the accumulators."""

    @abstractmethod
    def copy_out(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Write a part into float32 arrays of the model's names and shapes."""

    @abstractmethod
    def copy_in(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Replace a part by what float32 arrays of the model's names and shapes hold. Those of "accumulators" may be
        kept and written to until the next `clear`."""

    @abstractmethod
    def update(self, learning_rate: float, factor: float) -> None:
        """AdamW with the accumulators times `factor` as gradient."""

    @abstractmethod
    def evaluate(self, batch: Batch) -> float:
        """The loss sum of `batch` in nats, without dropout and without a gradient. Raises DeviceMemoryError."""

    @abstractmethod
    def token_log_probabilities(self, batch: Batch) -> Array:
        """[B, L] natural logarithms of the probabilities of the counted targets, 0 elsewhere; as `evaluate`. Raises
        DeviceMemoryError."""

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

    def gradient_norm(self) -> float:
        """Euclidean norm over all accumulators; finite if, and only if, every element is."""
        norm = self._norm(1.0)
        return norm if norm < _SURE_NORM else self._norm(_SMALL) / _SMALL

    def weight_norms(self) -> Array:
        """Euclidean norm of each trainable parameter, as the forward pass takes it, in the order of `shapes`. Summed in
        float64: libraries that sum millions of squares in float32 differ by 2e-3."""
        return np.array([np.sqrt(np.sum(np.square(rows, dtype=np.float64))) for rows in self._row_norms()], np.float32)

    def export_state(self) -> State:
        weights, first_moments, second_moments = map(self.copy_of, STATE_PARTS)
        return State(weights, first_moments, second_moments, self.updates, self._random_state())

    def import_state(self, state: State) -> None:
        """Take over what `export_state` gave, of either backend. Raises InvalidInputError if names or shapes differ."""
        check_state(state, self.shapes, "checkpoint")
        self.copy_in("weights", state.weights)
        self.copy_in("first_moments", state.first_moments)
        self.copy_in("second_moments", state.second_moments)
        self.updates = state.updates
        self._restore_random(state.random)

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
        """Turn a library's several ways of saying that memory ran out into DeviceMemoryError, the scratch emptied;
        where it kills instead, nothing can."""
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


def limit_of(node: NodeTable) -> int | None:
    """The bytes that a rank may take on its device."""
    return None if node.memory_limit_gb is None else int(node.memory_limit_gb * 1e9)


def check_state(state: State, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Whether weights and moments are exactly those of `shapes`. Raises InvalidInputError naming the first that
    isn't."""
    parts = {"weight": state.weights, "first moment": state.first_moments, "second moment": state.second_moments}
    for kind, arrays in parts.items():
        if arrays.keys() != shapes.keys():
            odd = sorted(arrays.keys() ^ shapes.keys())[0]
            raise InvalidInputError(where, f"{kind} of {odd!r} is missing from the checkpoint or the model")
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise InvalidInputError(
                    where, f"{kind} of {name!r} has shape {arrays[name].shape}, the model expects {shape}"
                )
