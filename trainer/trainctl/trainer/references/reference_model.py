"""The log-probabilities of usable samples by the base model: forward passes over samples of like lengths."""

from collections.abc import Callable, Iterator

import numpy as np

from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.trainer.backends.backend import Backend
from trainctl.trainer.common.errors import DeviceMemoryError
from trainctl.trainer.common.reference_cache import Values, spans
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices

Look = Callable[[int], object]
"""Called after each forward pass with the samples done so far; what it raises ends the computation."""


class ReferenceModel:
    """A loaded model in which nothing has been trained, and its data."""

    def __init__(self, backend: Backend, dataset: Dataset, batch_tokens: int) -> None:
        """`batch_tokens`: in one forward pass, with padding; at least one sample."""
        self._backend, self._dataset, self._batch_tokens = backend, dataset, batch_tokens
        self.computed = 0  # samples, again if they were computed twice
        self.targets, self.counts = dataset.usable_targets()

    def values(self, first: int, samples: int, look: Look) -> Values:
        """Nats, of the counted tokens of so many usable samples, in their order. Raises TrainctlError if memory isn't
        enough for one sample, InvalidInputError naming a sample whose values aren't finite, and what `look` does."""
        numbers = np.arange(first, first + samples, dtype=np.int64)
        counts = self.counts[numbers]
        starts = np.cumsum(counts) - counts
        found, done = np.empty(int(counts.sum()), np.float32), 0
        for batch in self._batches(numbers):
            own = batch - first
            found[spans(starts[own], counts[own])] = self._of(batch)
            done += len(batch)
            self.computed += len(batch)
            look(done)
        self._check(found, numbers)
        return found

    def _batches(self, numbers: Indices) -> Iterator[Indices]:
        """The longest first, each batch as wide as its first sample."""
        order = numbers[np.argsort(-self.targets[numbers], kind="stable")]
        done = 0
        while done < len(order):
            size = max(1, self._batch_tokens // int(self.targets[order[done]]))
            yield order[done : done + size]
            done += size

    def _of(self, numbers: Indices) -> Values:
        """In halves if memory is short."""
        batch = self._dataset.usable_batch(numbers)
        try:
            found: Values = self._backend.token_log_probabilities(batch, reference=True)[batch.counted > 0]
        except DeviceMemoryError as error:
            if len(numbers) == 1:
                raise TrainctlError(f"out of memory with one sample for the reference: {error}") from None
        else:
            return found
        half = len(numbers) // 2
        self._batch_tokens = max(1, half * int(self.targets[numbers[0]]))
        return np.concatenate([self._of(numbers[:half]), self._of(numbers[half:])])

    def _check(self, found: Values, numbers: Indices) -> None:
        wrong = np.flatnonzero(~np.isfinite(found))
        if len(wrong):
            ends = np.cumsum(self.counts[numbers])
            number = int(numbers[np.searchsorted(ends, wrong[0], side="right")])
            place = self._dataset.place(self._dataset.index(number))
            raise InvalidInputError(place, 'the reference has no finite log-probability; try model.dtype = "float32"')
