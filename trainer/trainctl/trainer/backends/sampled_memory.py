"""The peak of a memory whose owner keeps none, taken at the moments when most is held."""

from collections.abc import Callable

from trainctl.trainer.backends.protocol import Memory


class SampledMemory:
    """`held` gives what is held now, in bytes. The peak is the most that `sample` and `read` found since `reset`, so it
    misses what comes and goes between two of them."""

    def __init__(self, held: Callable[[], int], cap_bytes: int | None) -> None:
        self._held, self._cap = held, cap_bytes
        self._peak = 0

    def reset(self) -> None:
        """Begin a new peak."""
        self._peak = 0

    def sample(self) -> int:
        """What is held now."""
        now = self._held()
        self._peak = max(self._peak, now)
        return now

    def read(self) -> Memory:
        return Memory(self.sample(), self._peak, self._cap)
