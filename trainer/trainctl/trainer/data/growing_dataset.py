"""The data of a file that still grows: a data set for each sealed chunk, and their samples numbered through.

A thread adds chunks as `sealing` makes them. Everything else only reads what is there, or waits for more.
"""

import contextlib
import functools
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainctl.protocol.config.run_file import held_out_data
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import FileDigest
from trainctl.trainer.data.batch import Batch, collate
from trainctl.trainer.data.dataset import Dataset, Look, Seen, dataset_of, open_dataset, place_of
from trainctl.trainer.data.permutation import Indices, permute
from trainctl.trainer.data.sealing import Sealing, SealingProcess
from trainctl.trainer.data.token_cache import Report, no_report, read_cache

LOOK_SECONDS = 0.5
"""Seconds between two looks of what waits."""
_SHORT = 16
"""Characters of a chunk's digest that a checkpoint keeps."""


_PASS_SHIFT = 32


@dataclass(frozen=True)
class GrowingOrder:
    """The chunks sealed by now; `sealed` and `complete` give the next order."""

    seed: int
    starts: tuple[int, ...] = (0,)  # S_c of each chunk, and the number of all samples
    ended: bool = False

    @property
    def samples(self) -> int:
        """Samples of all sealed chunks."""
        return self.starts[-1]

    @property
    def chunks(self) -> int:
        """Sealed chunks."""
        return len(self.starts) - 1

    def sealed(self, samples: int) -> "GrowingOrder":
        """Return the order with another chunk of so many samples, perhaps none."""
        return GrowingOrder(self.seed, (*self.starts, self.samples + samples))

    def complete(self) -> "GrowingOrder":
        """The file has ended."""
        return GrowingOrder(self.seed, self.starts, ended=True)

    def covers(self, stop: int) -> bool:
        """Return whether the samples of all positions below `stop` are known."""
        return stop <= self.samples or (self.ended and self.samples > 0)

    def needed(self, cursor: int) -> int:
        """Return how many chunks, from the first on, the positions below `cursor` are in."""
        if cursor > self.samples:
            return self.chunks
        return int(np.searchsorted(self.starts[:-1], cursor, side="left"))

    def chunk_of(self, samples: Indices) -> Indices:
        """The chunk that each sample is in."""
        chunks: Indices = np.searchsorted(self.starts, samples, side="right") - 1
        return chunks

    def at(self, positions: Indices) -> Indices:
        """The sample at each position, numbered through all chunks. Raises IndexError for one that isn't known yet."""
        if len(positions) and not self.covers(int(positions.max()) + 1):
            raise IndexError(f"position {positions.max()} is not in the {self.samples} sealed samples")
        passes, within = np.divmod(positions, max(1, self.samples))
        chunks = self.chunk_of(within)
        found = np.empty(len(positions), np.int64)
        for turn, chunk in {*zip(passes.tolist(), chunks.tolist(), strict=True)}:
            here = (passes == turn) & (chunks == chunk)
            start, stop = self.starts[chunk : chunk + 2]
            found[here] = start + permute(within[here] - start, stop - start, self.seed, (turn << _PASS_SHIFT) + chunk)
        return found


class SealedChunks(NamedTuple):
    """What there is by now, replaced as a whole when a chunk is added."""

    order: GrowingOrder
    chunks: tuple[Dataset, ...] = ()
    chain: tuple[str, ...] = ("",)  # by number of chunks: the digest of all of them
    times: tuple[float, ...] = ()  # of time.perf_counter: when each chunk was sealed, and the end found
    following: int = 0  # lines after the last chunk
    caught_up: bool = False  # with what was in the file at the beginning


class GrowingDataset:
    """Samples are numbered through all sealed chunks; `samples` grows. It is made by `open_growing`."""

    def __init__(
        self, config: RunFile, folder: Path, where: str, evaluation: Dataset | None = None,
        told: Callable[["GrowingDataset"], None] = lambda _: None,
        failed: Callable[[TrainctlError], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """`told` is called on another thread whenever more is sealed, and `failed` when nothing more can be."""
        self._config, self._folder, self._where = config, folder, where
        self.evaluation, self._told, self._failed = evaluation, told, failed
        self._news = threading.Condition()
        self._now = SealedChunks(GrowingOrder(config.run.seed))
        self._error: TrainctlError | None = None
        self._process = SealingProcess(config, folder, where, self._take, self._fail)

    @property
    def now(self) -> SealedChunks:
        """What is sealed."""
        return self._now

    @property
    def samples(self) -> int:
        """All that are sealed."""
        return self._now.order.samples

    @property
    def held_out(self) -> int:
        """Samples of the evaluation's own files."""
        return self.evaluation.samples if self.evaluation is not None else 0

    @property
    def mean_weight(self) -> float:
        """Of the first chunk with samples, so that it doesn't depend on how much there is."""
        return self._first.mean_weight

    @property
    def digest(self) -> str:
        """Of all chunks up to the first one with samples, and of the evaluation's files."""
        own = self._now.chain[self._now.chunks.index(self._first) + 1]
        return (
            own if self.evaluation is None else hashlib.sha256(f"{own} {self.evaluation.digest}".encode()).hexdigest()
        )

    @property
    def files(self) -> tuple[FileDigest, ...]:
        """The file as far as `digest` goes, and the evaluation's."""
        name = Path(self._config.data.path).name
        own = FileDigest(name, self._now.chain[self._now.chunks.index(self._first) + 1])
        held_out = self.evaluation.files if self.evaluation is not None else ()
        return (own, *(FileDigest(f"held-out {one.name}", one.digest) for one in held_out))

    @property
    def _first(self) -> Dataset:
        return next(chunk for chunk in self._now.chunks if chunk.samples)

    def close(self) -> None:
        """End the process that follows the file."""
        self._process.close()

    # ------------------------------------------------------------ positions

    def samples_at(self, positions: Indices, seed: int) -> Indices:
        """The sample at each position. Raises TrainctlError for one that isn't sealed."""
        try:
            return self._now.order.at(positions)
        except IndexError as error:
            raise TrainctlError(f"{self._config.data.path}: {error}") from None

    def at_hand(self, positions: Indices) -> Indices:
        """As many positions of the first chunk with samples, the same on all ranks."""
        return positions % self._first.samples

    def covers(self, stop: int) -> bool:
        """Whether the samples of all positions below `stop` are sealed."""
        return self._now.order.covers(stop)

    def wait_for(self, stop: int, look: Look) -> float:
        """Wait until it `covers` them; returns since when it does. Raises what `look` does, and why sealing ended."""
        self.wait_until(lambda now: now.order.covers(stop), look)
        now = self._now
        return now.times[-1] if stop > now.order.samples else now.times[now.order.needed(stop) - 1]

    def wait_until(self, enough: Callable[[SealedChunks], bool], look: Look) -> None:
        """Until what is sealed is `enough`. Raises as `wait_for`."""
        with self._news:
            while not enough(self._now):
                if self._error is not None:
                    raise self._error
                look()
                self._news.wait(LOOK_SECONDS)

    # ------------------------------------------------------------ checkpoints

    def seen(self, cursor: int) -> Seen:
        """The chunks that the positions below `cursor` are in."""
        now = self._now
        count = now.order.needed(cursor)
        chunks = tuple(chunk.digest[:_SHORT] for chunk in now.chunks[:count])
        return Seen(now.order.starts[count], now.chain[count], chunks)

    def check_seen(self, seen: Seen, cursor: int, look: Look) -> None:
        """Wait for as many chunks as were seen. Raises InvalidInputError naming the first one that is missing or
        another one."""
        wanted, path = len(seen.chunks), self._config.data.path
        self.wait_until(lambda now: len(now.chunks) >= wanted or now.caught_up, look)
        now = self._now
        size = self._config.data.chunk_samples
        for number, (chunk, digest) in enumerate(zip(now.chunks, seen.chunks, strict=False)):
            if not chunk.digest.startswith(digest):
                first, last = number * size + 1, (number + 1) * size
                problem = (
                    f"chunk {number + 1} (samples {first:,} to {last:,}) isn't the one that the run was trained on"
                )
                raise InvalidInputError(path, problem)
        if len(now.chunks) < wanted:
            problem = f"has {len(now.chunks)} chunks, but the run was trained on {wanted}; put the rest back"
            raise InvalidInputError(path, problem)
        if cursor > seen.samples and not (now.order.ended and now.order.samples == seen.samples):
            problem = f"the run has trained on all {seen.samples:,} samples and begun again, so none can be added"
            raise InvalidInputError(path, problem)

    # ------------------------------------------------------------ samples

    def batch(self, indices: Indices) -> Batch:
        """Training samples as one micro-batch."""
        now = self._now
        chunks = now.order.chunk_of(indices)
        if (chunks == chunks[0]).all():
            only: Dataset = now.chunks[chunks[0]]
            return only.batch(indices - now.order.starts[chunks[0]])
        where = zip(chunks.tolist(), indices.tolist(), strict=True)
        return collate([now.chunks[chunk].sample(index - now.order.starts[chunk])[0] for chunk, index in where])

    def targets(self, indices: Indices) -> Indices:
        """How many targets each of these training samples has, counted or not."""
        now = self._now
        chunks, found = now.order.chunk_of(indices), np.empty(len(indices), np.int64)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            found[here] = now.chunks[chunk].targets(indices[here] - now.order.starts[chunk])
        return found

    def held_out_targets(self, indices: Indices) -> Indices:
        """As `targets`, of held-out samples."""
        assert self.evaluation is not None
        return self.evaluation.targets(indices)

    def held_out_batch(self, indices: Indices) -> Batch:
        """Held-out samples as one micro-batch."""
        assert self.evaluation is not None
        return self.evaluation.batch(indices)

    def probe_batch(self) -> Batch:
        """Of the first chunk with samples."""
        return self._first.probe_batch()

    # ------------------------------------------------------------ the other thread

    def _take(self, said: Sealing) -> None:
        now = self._now
        if said.cache:
            now = self._with_chunk(now, said.cache)
        order = now.order.complete() if said.ended else now.order
        if said.ended and not order.samples:
            problem = f"{self._config.data.path} has ended without a sample that has a token to learn"
            raise InvalidInputError(f"{self._where}: data.path", problem)
        with self._news:
            self._now = now._replace(
                order=order, following=said.following, caught_up=now.caught_up or said.caught_up,
                times=(*now.times, time.perf_counter()) if said.cache or said.ended else now.times,
            )  # fmt: skip
            self._news.notify_all()
        if said.cache or said.ended:
            self._told(self)

    def _with_chunk(self, now: SealedChunks, cache: str) -> SealedChunks:
        before = len(now.chunks) * self._config.data.chunk_samples
        chunk = dataset_of(
            self._config, read_cache(self._folder / cache), f"{self._where}: data.path",
            lambda index: place_of(self._config, before + index), may_be_empty=True,
        )  # fmt: skip
        chain = hashlib.sha256(f"{now.chain[-1]} {chunk.digest}".encode()).hexdigest()
        return now._replace(
            order=now.order.sealed(chunk.samples), chunks=(*now.chunks, chunk), chain=(*now.chain, chain)
        )

    def _fail(self, error: TrainctlError) -> None:
        with self._news:
            self._error = error
            self._news.notify_all()
        self._failed(error)


TrainingData = Dataset | GrowingDataset
"""Samples by index, for training and held out; a Dataset has all of them from the beginning."""


def open_growing(
    config: RunFile, folder: Path, where: str, report: Report = no_report, look: Look = lambda: None,
    first: Callable[[SealedChunks], object] = lambda _: None, **calls: Callable[..., None],
) -> GrowingDataset:  # fmt: skip
    """The data of a run file whose file grows, once its first chunk is sealed; until then `first` is shown what there
    is. `calls` as of GrowingDataset. Raises InvalidInputError as `open_dataset`, and what `look` does."""
    held_out = held_out_data(config)
    evaluation = open_dataset(held_out, folder, where, report) if held_out is not None else None
    made = GrowingDataset(config, folder, where, evaluation, **calls)
    with contextlib.ExitStack() as undo:
        undo.callback(made.close)
        made.wait_until(lambda now: bool(now.order.samples), functools.partial(_show, made, first, look))
        undo.pop_all()
    return made


def _show(made: GrowingDataset, first: Callable[[SealedChunks], object], look: Look) -> None:
    first(made.now)
    look()
