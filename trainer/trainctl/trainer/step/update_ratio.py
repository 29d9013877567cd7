"""Update-to-weight ratio: how large a step's update is, relative to the trained weights."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np

from trainctl.trainer.backends.base import Array, Backend


class UpdateRatio:
    """Measures every so many steps. Each measurement copies the trained weights twice, in float32, to main memory."""

    def __init__(self, backend: Backend, every_steps: int) -> None:
        """`every_steps` 0: never."""
        self._backend, self._every_steps = backend, every_steps
        self._found: dict[str, float] = {}

    @contextmanager
    def measured(self, step: int) -> Iterator[None]:
        """Around the update of a step."""
        if not self._every_steps or step % self._every_steps:
            yield
            return
        before = self._backend.copy_of("weights")
        yield
        after = self._backend.copy_of("weights")
        size = _norm(before)
        if size:
            self._found = {"update_ratio": _norm({name: after[name] - before[name] for name in before}) / size}

    def take(self) -> dict[str, float]:
        """The metric of the step that was just measured; nothing of any other."""
        found, self._found = self._found, {}
        return found


def _norm(arrays: Mapping[str, Array]) -> float:
    """The global norm, summed in float64."""
    return float(np.sqrt(sum(float(np.sum(np.square(array, dtype=np.float64))) for array in arrays.values())))
