"""The data of a file that still grows: a data set for each sealed chunk, and their samples numbered through.

A thread adds chunks as the process that follows the file seals them. Everything else only reads what is there, or waits
for more.
"""

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from trainctl.protocol.config.run_file import held_out_data
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError, TrainctlError
from trainctl.protocol.messages import FileDigest
from trainctl.trainer.common.errors import first_line
from trainctl.trainer.data.batch import Batch, collate
from trainctl.trainer.data.dataset import Dataset, Look, Seen, open_dataset, place_of
from trainctl.trainer.data.permutation import Indices, permute
from trainctl.trainer.data.token_cache import Report, no_report, read_cache
from trainctl.trainer.data.tokenizing import News, news_of, start_process

LOOK_SECONDS = 0.5
"""Seconds between two looks of what waits."""
_SHORT = 16
"""Characters of a chunk's digest that a checkpoint keeps."""
_PASS_SHIFT = 32


@dataclass(frozen=True)
class GrowingOrder:
    """The chunks sealed by now."""

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

    def covers(self, stop: int) -> bool:
        """Return whether the samples of all positions below `stop` are known."""
        return stop <= self.samples or (self.ended and self.samples > 0)

    def needed(self, cursor: int) -> int:
        """Return how many chunks, from the first on, the positions below `cursor` are in."""
        if cursor > self.samples:
            return self.chunks
        return int(np.searchsorted(self.starts[:-1], cursor, side="left"))

    def chunk_of(self, samples: Indices) -> Indices:
        """Return the chunk that each sample is in."""
        chunks: Indices = np.searchsorted(self.starts, samples, side="right") - 1
        return chunks

    def at(self, positions: Indices) -> Indices:
        """Return the sample at each position, numbered through all chunks. Raises IndexError for one that isn't known
        yet."""
        if len(positions) and not self.covers(int(positions.max()) + 1):
            raise IndexError(f"position {positions.max()} is not in the {self.samples} sealed samples")
        passes, within = np.divmod(positions, max(1, self.samples))
        chunks = self.chunk_of(within)
        samples = np.empty(len(positions), np.int64)
        for turn, chunk in {*zip(passes.tolist(), chunks.tolist(), strict=True)}:
            here = (passes == turn) & (chunks == chunk)
            start, stop = self.starts[chunk : chunk + 2]
            epoch = (turn << _PASS_SHIFT) + chunk
            samples[here] = start + permute(within[here] - start, stop - start, self.seed, epoch)
        return samples


@dataclass(frozen=True)
class SealedChunks:
    """The chunks by now, replaced as a whole when a chunk is added."""

    order: GrowingOrder
    chunks: tuple[Dataset, ...] = ()
    chain: tuple[str, ...] = ("",)  # by number of chunks: the digest of all of them
    times: tuple[float, ...] = ()  # of time.perf_counter: when each chunk was sealed, and the end found
    following: int = 0  # lines after the last chunk
    caught_up: bool = False  # with what was in the file at the beginning


class GrowingDataset:
    """Samples are numbered through all sealed chunks; `samples` grows."""

    def __init__(
        self,
        config: RunFile,
        folder: Path,
        where: str,
        evaluation: Dataset | None,
        on_sealed: Callable[["GrowingDataset"], None],
        on_failed: Callable[[TrainctlError], None],
    ) -> None:
        """`on_sealed` is called on another thread whenever more is sealed, and `on_failed` when nothing more can be."""
        self._config, self._folder, self._where = config, folder, where
        self.evaluation, self._on_sealed, self._on_failed = evaluation, on_sealed, on_failed
        self._news = threading.Condition()
        self.now = SealedChunks(GrowingOrder(config.run.seed))  # replaced as a whole
        self._first: Dataset  # the first chunk with samples: what follows doesn't depend on how much there is
        self.mean_weight = 0.0
        self.digest = ""  # of all chunks up to that one, and of the evaluation's files
        self.files: tuple[FileDigest, ...] = ()
        self._error: TrainctlError | None = None
        self._process = start_process(config, folder, where, follows=True)
        self._is_closed = False
        self._thread = threading.Thread(target=self._follow, name="sealing", daemon=True)
        self._thread.start()

    @property
    def samples(self) -> int:
        """Samples that are sealed."""
        return self.now.order.samples

    @property
    def held_out(self) -> int:
        """Samples of the evaluation's own files."""
        return self.evaluation.samples if self.evaluation is not None else 0

    def close(self) -> None:
        """End the process that follows the file, and the thread."""
        self._is_closed = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        self._process.wait()
        self._thread.join()

    # ------------------------------------------------------------ positions

    def samples_at(self, positions: Indices, seed: int) -> Indices:
        """Return the sample at each position. Raises TrainctlError for one that isn't sealed."""
        try:
            return self.now.order.at(positions)
        except IndexError as error:
            raise TrainctlError(f"{self._config.data.path}: {error}") from None

    def at_hand(self, positions: Indices) -> Indices:
        """Return as many positions of the first chunk with samples, the same on all ranks."""
        return positions % self._first.samples

    def covers(self, stop: int) -> bool:
        """Return whether the samples of all positions below `stop` are sealed."""
        return self.now.order.covers(stop)

    def wait_for(self, stop: int, look: Look) -> float:
        """Wait until it `covers` them. Return since when it does. Raises what `look` does, and why sealing ended."""
        self.wait_until(lambda now: now.order.covers(stop), look)
        now = self.now
        return now.times[-1] if stop > now.order.samples else now.times[now.order.needed(stop) - 1]

    def wait_until(self, enough: Callable[[SealedChunks], bool], look: Callable[[], object]) -> None:
        """Wait until what is sealed is `enough`. Raises as `wait_for`."""
        with self._news:
            while not enough(self.now):
                if self._error is not None:
                    raise self._error
                look()
                self._news.wait(LOOK_SECONDS)

    # ------------------------------------------------------------ checkpoints

    def seen(self, cursor: int) -> Seen:
        """Return the chunks that the positions below `cursor` are in."""
        now = self.now
        count = now.order.needed(cursor)
        chunks = tuple(chunk.digest[:_SHORT] for chunk in now.chunks[:count])
        return Seen(now.order.starts[count], now.chain[count], chunks)

    def check_seen(self, seen: Seen, cursor: int, look: Look) -> None:
        """Wait for as many chunks as were seen. Raises InvalidInputError naming the first one that is missing or
        another one."""
        wanted, path = len(seen.chunks), self._config.data.path
        self.wait_until(lambda now: len(now.chunks) >= wanted or now.caught_up, look)
        now = self.now
        size = self._config.data.chunk_samples
        for number, (chunk, digest) in enumerate(zip(now.chunks, seen.chunks, strict=False)):
            if not chunk.digest.startswith(digest):
                first, last = number * size + 1, (number + 1) * size
                which = f"chunk {number + 1} (samples {first:,} to {last:,})"
                raise InvalidInputError(path, f"{which} isn't the one that the run was trained on")
        if len(now.chunks) < wanted:
            problem = f"has {len(now.chunks)} chunks, but the run was trained on {wanted}; put the rest back"
            raise InvalidInputError(path, problem)
        if cursor > seen.samples and not (now.order.ended and now.order.samples == seen.samples):
            problem = f"the run has trained on all {seen.samples:,} samples and begun again, so none can be added"
            raise InvalidInputError(path, problem)

    # ------------------------------------------------------------ samples

    def batch(self, indices: Indices) -> Batch:
        """Return training samples as one micro-batch."""
        now = self.now
        chunks = now.order.chunk_of(indices)
        if (chunks == chunks[0]).all():
            chunk = int(chunks[0])
            return now.chunks[chunk].batch(indices - now.order.starts[chunk])
        places = zip(chunks.tolist(), indices.tolist(), strict=True)
        return collate([now.chunks[at].sample(index - now.order.starts[at])[0] for at, index in places])

    def targets(self, indices: Indices) -> Indices:
        """Return how many targets each of these training samples has, counted or not."""
        now = self.now
        chunks, targets = now.order.chunk_of(indices), np.empty(len(indices), np.int64)
        for chunk in np.unique(chunks):
            here = chunks == chunk
            targets[here] = now.chunks[chunk].targets(indices[here] - now.order.starts[chunk])
        return targets

    def held_out_targets(self, indices: Indices) -> Indices:
        """Return how many targets each of these held-out samples has."""
        assert self.evaluation is not None
        return self.evaluation.targets(indices)

    def held_out_batch(self, indices: Indices) -> Batch:
        """Return held-out samples as one micro-batch."""
        assert self.evaluation is not None
        return self.evaluation.batch(indices)

    def probe_batch(self) -> Batch:
        """Return the probe of the first chunk with samples."""
        return self._first.probe_batch()

    # ------------------------------------------------------------ the other thread

    def _follow(self) -> None:
        try:
            assert self._process.stdout is not None
            with self._process.stdout:
                for news in news_of(self._process):
                    self._take(news)
                    if news.ended:
                        return
            if not self._is_closed:
                raise TrainctlError("the process that follows the data has ended; look in the kernel log for a kill")
        except TrainctlError as error:
            self._fail(error)
        except (OSError, ValueError) as error:
            self._fail(TrainctlError(f"the token cache can't be read: {first_line(error)}; delete it to make it again"))

    def _take(self, news: News) -> None:
        now, order, config = self.now, self.now.order, self._config
        chunks, chain = now.chunks, now.chain
        if news.cache:
            before = len(chunks) * config.data.chunk_samples
            cache, where = read_cache(self._folder / news.cache), f"{self._where}: data.path"
            chunk = Dataset(config, cache, where, lambda at: place_of(config, before + at), may_be_empty=True)
            chunks = (*chunks, chunk)
            chain = (*chain, hashlib.sha256(f"{chain[-1]} {chunk.digest}".encode()).hexdigest())
            if chunk.samples and not order.samples:
                self._first, self.mean_weight, self.digest = chunk, chunk.mean_weight, chain[-1]
                self.files = (FileDigest(Path(config.data.path).name, chain[-1]),)
                if self.evaluation is not None:
                    self.digest = hashlib.sha256(f"{chain[-1]} {self.evaluation.digest}".encode()).hexdigest()
                    self.files += self.evaluation.held_out_files
            order = replace(order, starts=(*order.starts, order.samples + chunk.samples))
        if news.ended and not order.samples:
            problem = f"{config.data.path} has ended without a sample that has a token to learn"
            raise InvalidInputError(f"{self._where}: data.path", problem)
        has_more = bool(news.cache) or news.ended
        with self._news:
            self.now = SealedChunks(
                order=replace(order, ended=news.ended),
                chunks=chunks,
                chain=chain,
                times=(*now.times, time.perf_counter()) if has_more else now.times,
                following=news.following,
                caught_up=now.caught_up or news.caught_up,
            )
            self._news.notify_all()
        if has_more:
            self._on_sealed(self)

    def _fail(self, error: TrainctlError) -> None:
        with self._news:
            self._error = error
            self._news.notify_all()
        self._on_failed(error)


TrainingData = Dataset | GrowingDataset
"""Samples by index, for training and held out; a Dataset has all of them from the beginning."""


def open_growing(
    config: RunFile,
    folder: Path,
    where: str,
    report: Report = no_report,
    look: Callable[[SealedChunks], object] = lambda _: None,
    *,
    on_sealed: Callable[[GrowingDataset], None] = lambda _: None,
    on_failed: Callable[[TrainctlError], None] = lambda _: None,
) -> GrowingDataset:
    """Return the data of a run file whose file grows, once its first chunk is sealed; until then `look` is shown what
    there is. The other two are called as GrowingDataset says. Raises InvalidInputError as `open_dataset`, and what
    `look` does."""
    held_out = held_out_data(config)
    evaluation = open_dataset(held_out, folder, where, report) if held_out is not None else None
    with contextlib.ExitStack() as opened:
        dataset = GrowingDataset(config, folder, where, evaluation, on_sealed, on_failed)
        opened.callback(dataset.close)
        dataset.wait_until(lambda now: bool(now.order.samples), lambda: look(dataset.now))
        opened.pop_all()
    return dataset
