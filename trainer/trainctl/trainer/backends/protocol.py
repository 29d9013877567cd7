"""What a rank asks of an array library.

A backend holds one model: master weights and AdamW moments in float32, a compute copy where the run's dtype is lower,
float32 gradient accumulators, and a scratch for the one micro-batch in flight. Nothing reaches the accumulators but by
`accumulate`, so a micro-batch that failed or was fenced half-way leaves no trace.

AdamW (Loshchilov and Hutter 2019; bias correction as in Kingma and Ba 2015), the same in both backends. With
gradient g, update count t from 1, learning rate a, decay w (matrices only: ndim >= 2), all elementwise and in this
order:

    p  = p * (1 - a w)
    m  = b1 m + (1 - b1) g          v = b2 v + (1 - b2) g^2
    p  = p - (a / (1 - b1^t)) m / (sqrt(v) / sqrt(1 - b2^t) + eps)
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.batch import Batch

Array = NDArray[np.float32]
BackendName = Literal["torch", "mlx"]
Part = Literal["accumulators", "weights", "first_moments", "second_moments"]
STATE_PARTS: tuple[Part, ...] = ("weights", "first_moments", "second_moments")


@dataclass(frozen=True)
class Memory:
    """What the trainer holds on its device, in bytes; None where it cannot be known."""

    used_bytes: int | None = None
    peak_bytes: int | None = None  # since `reset_peak`
    cap_bytes: int | None = None


@dataclass
class State:
    """Everything an update reads or writes, under Hugging Face names."""

    weights: dict[str, Array]
    first_moments: dict[str, Array]
    second_moments: dict[str, Array]
    updates: int  # AdamW's t: skipped steps do not count
    random: dict[str, NDArray[Any]] = field(default_factory=dict)  # generators' states, the library's name first


class Backend(Protocol):
    """One model on one device, used by one thread. Calls go forward, backward, accumulate for each micro-batch, then
    gradient_norm and update."""

    @property
    def name(self) -> BackendName: ...

    @property
    def device(self) -> str:
        """Such as "cpu", "cuda:0 NVIDIA H200" or "gpu Apple M2 Ultra"."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of each trainable parameter by Hugging Face name, in ascending order of name."""

    @property
    def updates(self) -> int:
        """AdamW's t: how often `update` was called in the life of the state."""

    @updates.setter
    def updates(self, count: int) -> None: ...

    def forward(self, batch: Batch, scale: float) -> float:
        """The loss sum of `batch` in nats; `backward` will differentiate it times `scale`. Raises DeviceMemoryError."""

    def backward(self) -> None:
        """The gradient of the last `forward` into scratch. Raises DeviceMemoryError."""

    def accumulate(self) -> None:
        """Add the scratch to the float32 accumulators and empty it; all of it or nothing. Raises DeviceMemoryError."""

    def forget(self) -> None:
        """Empty the scratch."""

    def discard(self) -> None:
        """Empty the scratch and give memory back to the device."""

    def clear(self) -> None:
        """Zero the accumulators."""

    def gradients(self) -> dict[str, Array]:
        """A copy of the accumulators by Hugging Face name."""

    def copy_out(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Write a part into float32 arrays of the model's names and shapes."""

    def copy_in(self, part: Part, arrays: Mapping[str, Array]) -> None:
        """Replace a part by what float32 arrays of the model's names and shapes hold. Those of "accumulators" may be
        kept and written to until the next `clear`."""

    def gradient_norm(self) -> float:
        """Euclidean norm over all accumulators; finite if, and only if, every element is."""

    def update(self, learning_rate: float, factor: float) -> None:
        """AdamW with the accumulators times `factor` as gradient."""

    def evaluate(self, batch: Batch) -> float:
        """The loss sum of `batch` in nats, without dropout and without a gradient. Raises DeviceMemoryError."""

    def token_log_probabilities(self, batch: Batch) -> Array:
        """[B, L] natural logarithms of the probabilities of the counted targets, 0 elsewhere; as `evaluate`. Raises
        DeviceMemoryError."""

    def weight_norms(self) -> Array:
        """Euclidean norm of each trainable parameter, as the forward pass takes it, in the order of `shapes`."""

    @property
    def tf32(self) -> bool:
        """Whether products of float32 matrices may be rounded to TF32."""

    def reset_peak(self) -> None:
        """Begin a new peak of memory, at what is held now."""

    def memory(self) -> Memory: ...

    def export_state(self) -> State: ...

    def import_state(self, state: State) -> None:
        """Take over what `export_state` gave, of either backend. Raises InvalidInputError if names or shapes differ."""


def check_state(state: State, shapes: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Whether weights and moments are exactly those of `shapes`. Raises InvalidInputError naming the first that
    isn't."""
    for kind, arrays in _parts(state):
        if arrays.keys() != shapes.keys():
            odd = sorted(arrays.keys() ^ shapes.keys())[0]
            raise InvalidInputError(where, f"{kind} of {odd!r} is in only one of the checkpoint and the model")
        for name, shape in shapes.items():
            if arrays[name].shape != shape:
                raise InvalidInputError(where, f"{kind} of {name!r} is {arrays[name].shape}, the model's is {shape}")


def _parts(state: State) -> tuple[tuple[str, dict[str, Array]], ...]:
    return ("weight", state.weights), ("first moment", state.first_moments), ("second moment", state.second_moments)
