"""Prefetching: the next micro-batches are assembled on threads while one is computed."""

from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice

from trainctl.trainer.data.batch import Batch
from trainctl.trainer.data.permutation import Indices


class Prefetch:
    """`make` turns positions into a batch, the same one whenever it is asked. Up to `ahead` batches are made before
    they are needed, on `workers` threads. Belongs to one thread."""

    def __init__(self, make: Callable[[Indices], Batch], ahead: int, workers: int) -> None:
        self._make, self._ahead, self._workers = make, ahead, workers
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[bytes, Future[Batch]] = {}

    def get(self, positions: Indices, following: Iterable[Indices]) -> Batch:
        """The batch of `positions`; those of the first `following` are begun. Raises what `make` does, on whichever
        thread."""
        ready = self._begun.pop(positions.tobytes(), None)
        self.expect(following)
        return self._make(positions) if ready is None else ready.result()

    def expect(self, following: Iterable[Indices]) -> None:
        """Begin the batches of the first `following`, and forget the others."""
        if not self._ahead:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self._workers, thread_name_prefix="prefetch")
        wanted = {positions.tobytes(): positions for positions in islice(following, self._ahead)}
        for key in self._begun.keys() - wanted.keys():
            self._begun.pop(key).cancel()
        for key in wanted.keys() - self._begun.keys():
            self._begun[key] = self._pool.submit(self._make, wanted[key])

    def close(self) -> None:
        """End the threads; a batch in the making is finished first."""
        self._begun.clear()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
