"""What both backends do alike: parts of a model to and from arrays of the host, and the kinds of bad numbers.

A part is one float32 value for each trainable scalar. Copies go straight between the device and the arrays that the
caller brings, so a buffer shared with another process costs one copy each way.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainctl.trainer.backends.protocol import Array, Part, State, check_state
from trainctl.trainer.common.errors import DeviceMemoryError, first_line

_SURE_NORM = 1e18
"""Below it no square has overflowed float32."""
_SMALL = 2.0**-100
"""Brings every finite float32 where its square is finite, and those that made a norm of `_SURE_NORM` not to zero."""


class ModelParts(ABC):
    """The common half of a `Backend`; see its docstrings."""

    shapes: Mapping[str, tuple[int, ...]]
    updates: int

    @abstractmethod
    def copy_out(self, part: Part, arrays: Mapping[str, Array]) -> None: ...

    @abstractmethod
    def copy_in(self, part: Part, arrays: Mapping[str, Array]) -> None: ...

    @abstractmethod
    def discard(self) -> None: ...

    @abstractmethod
    def _norm(self, scale: float) -> float:
        """Euclidean norm of the accumulators times `scale`, in float32."""

    @abstractmethod
    def _row_norms(self) -> Iterator[Array]:
        """Of each trainable parameter in the order of `shapes`: the norms over its last axis."""

    @abstractmethod
    def _random_state(self) -> dict[str, NDArray[Any]]: ...

    @abstractmethod
    def _restore_random(self, states: dict[str, NDArray[Any]]) -> None: ...

    @abstractmethod
    def _is_out_of_memory(self, error: BaseException) -> bool: ...

    def gradients(self) -> dict[str, Array]:
        return self._copy_of("accumulators")

    def gradient_norm(self) -> float:
        norm = self._norm(1.0)
        return norm if norm < _SURE_NORM else self._norm(_SMALL) / _SMALL

    def weight_norms(self) -> Array:
        """Summed in float64: libraries that sum millions of squares in float32 differ by 2e-3."""
        return np.array([np.sqrt(np.sum(np.square(rows, dtype=np.float64))) for rows in self._row_norms()], np.float32)

    def export_state(self) -> State:
        parts = (self._copy_of("weights"), self._copy_of("first_moments"), self._copy_of("second_moments"))
        return State(*parts, self.updates, self._random_state())

    def import_state(self, state: State) -> None:
        check_state(state, self.shapes, "checkpoint")
        self.copy_in("weights", state.weights)
        self.copy_in("first_moments", state.first_moments)
        self.copy_in("second_moments", state.second_moments)
        self.updates = state.updates
        self._restore_random(state.random)

    def _copy_of(self, part: Part) -> dict[str, Array]:
        arrays = {name: np.empty(shape, np.float32) for name, shape in self.shapes.items()}
        self.copy_out(part, arrays)
        return arrays

    @contextmanager
    def _memory_errors(self) -> Iterator[None]:
        """Turn a library's several ways of saying that memory ran out into DeviceMemoryError, the scratch emptied;
        where it kills instead, nothing can."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if not self._is_out_of_memory(error):
                raise
            text = first_line(error)
        else:
            return
        self.discard()  # outside the handler, so that the traceback's frames no longer hold the graph
        raise DeviceMemoryError(text)
