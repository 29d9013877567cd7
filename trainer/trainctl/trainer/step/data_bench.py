"""`python -m trainctl.trainer.step.data_bench RUN.toml`: how fast a run's data are read without training, as JSON.

The data are tokenized as the run would, in a temporary folder beside the node's token caches. Then one rank's
micro-batches are assembled from that cache: first from the disk, then the same ones from memory.
"""

import argparse
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trainctl.protocol.batch.data_statistics import Assembling, DataRates, StepNeed
from trainctl.protocol.config import run_file
from trainctl.protocol.config.names import node_directory
from trainctl.protocol.config.run_tables import NodeTable, RunFile, micro_of, micro_tokens_of
from trainctl.protocol.errors import TrainctlError
from trainctl.trainer.backends.load import load
from trainctl.trainer.common.errors import DeviceMemoryError, first_line
from trainctl.trainer.data.batch import Prefetch
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.data.permutation import Indices, samples_at
from trainctl.trainer.data.token_cache import drop_pages, sources_of
from trainctl.trainer.data.tokenizing import open_cache
from trainctl.trainer.step.micro_batches import Limits, longest_first

COLD_SECONDS, WARM_SECONDS = 3.0, 1.0
"""Most that is read from the disk, and least that is read from memory."""
_MOST_SAMPLES = 1 << 17
"""Limit of the samples that are read from the disk."""
_PASSES = 3
"""Micro-batches timed to find what training takes, after one that warms up."""


class MicroBatchReader:
    """One rank's micro-batches in the order of its steps, assembled ahead as it would."""

    def __init__(self, config: RunFile, node: str, dataset: Dataset) -> None:
        self._config, self._dataset = config, dataset
        table = config.nodes.get(node, NodeTable())
        self._batch, self._share = config.batch.global_, table.share or config.batch.global_
        self._limits = Limits(micro_of(config, table), micro_tokens_of(config, table))

    def pieces(self) -> Iterator[Indices]:
        """Yield the micro-batches of one epoch, or of its first samples."""
        cursor = 0
        while cursor == 0 or cursor + self._batch <= min(self._dataset.samples, _MOST_SAMPLES):
            positions = np.arange(cursor, cursor + self._share, dtype=np.int64)
            yield from self._limits.cut(*longest_first(positions, lambda at: self._dataset.targets(self._samples(at))))
            cursor += self._batch

    def make(self, positions: Indices) -> Any:
        """Return the micro-batch of some positions."""
        return self._dataset.batch(self._samples(positions))

    def read(self, pieces: Iterator[Indices], seconds: float) -> tuple[Assembling, list[Indices]]:
        """Assemble micro-batches for about so many seconds, or until there are no more; and which they were."""
        data = self._config.data
        ahead = Prefetch(self.make, data.prefetch, data.workers)
        following, done, tokens = deque(islice(pieces, data.prefetch + 1)), [], 0
        begun = time.perf_counter()
        try:
            while following and time.perf_counter() - begun < seconds:
                done.append(following.popleft())
                following.extend(islice(pieces, 1))
                tokens += ahead.get(done[-1], following).tokens
            return Assembling(len(done), tokens, time.perf_counter() - begun), done
        finally:
            ahead.close()

    def _samples(self, positions: Indices) -> Indices:
        return samples_at(positions, self._dataset.samples, self._config.run.seed)


def bench(config: RunFile, node: str, where: str, caches: Path | None = None, *, with_model: bool = False) -> DataRates:
    """Return the rates of a run file as `node` has it. Raises InvalidInputError as `open_dataset` and, with the model,
    as `load`; TrainctlError if memory doesn't suffice."""
    with tempfile.TemporaryDirectory(prefix="trainctl-bench-", dir=caches) as name:
        folder = Path(name)
        parts = [config, held_out] if (held_out := run_file.held_out_data(config)) else [config]
        sources = [source for part in parts for source in sources_of(part)]
        drop_pages(sources)
        begun = time.perf_counter()
        tokens = sum(len(open_cache(part, folder, where).tokens) for part in parts)
        tokenizing_seconds = time.perf_counter() - begun
        is_cold = drop_pages(path for path in folder.rglob("*.bin"))
        dataset = open_dataset(config, folder, where)
        reader = MicroBatchReader(config, node, dataset)
        first, pieces = reader.read(reader.pieces(), COLD_SECONDS)
        return DataRates(
            source_bytes=sum(source.stat().st_size for source in sources),
            tokens=tokens,
            tokenizing_seconds=tokenizing_seconds,
            micro_batch=micro_of(config, config.nodes.get(node, NodeTable())),
            prefetch=config.data.prefetch,
            workers=config.data.workers,
            cold=first if is_cold else None,
            warm=_warm(reader, pieces),
            need=_timed_need(config, node, reader, where) if with_model else None,
        )


def _warm(reader: MicroBatchReader, pieces: Sequence[Indices]) -> Assembling:
    """Read the same micro-batches again, over and over if they are few."""
    count, tokens, seconds = 0, 0, 0.0
    while seconds < WARM_SECONDS:
        rate, _ = reader.read(iter(pieces), WARM_SECONDS)
        count, tokens, seconds = count + rate.micro_batches, tokens + rate.tokens, seconds + rate.seconds
    return Assembling(count, tokens, seconds)


def _timed_need(config: RunFile, node: str, reader: MicroBatchReader, where: str) -> StepNeed:
    """Time forward and backward of a few micro-batches."""
    backend = load(config, config.nodes.get(node, NodeTable()), where)
    scales = dict.fromkeys(backend.recipe.objective.spec.weights, 1.0)
    timed: list[tuple[int, float]] = []
    pieces = reader.pieces()
    for number in range(_PASSES + 1):
        piece = next(pieces, None)
        if piece is None:
            pieces = reader.pieces()
            piece = next(pieces)
        batch = reader.make(piece)
        begun = time.perf_counter()
        try:
            backend.loss_and_gradient(batch, scales, adding=None)
        except DeviceMemoryError as error:
            problem = f"out of memory with a micro-batch of {len(batch)}: {error}"
            raise TrainctlError(f"{problem}; lower batch.micro, or give --no-model") from None
        backend.device.wait()
        if number:
            timed.append((batch.tokens, time.perf_counter() - begun))
    rate = sum(tokens for tokens, _ in timed) / sum(seconds for _, seconds in timed)
    return StepNeed(rate, "model", f"{_PASSES} micro-batches with {backend.name} on {backend.device.name}")


def main() -> int:
    """Print one JSON line, and return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.trainer.step.data_bench", description="A run's data.")
    parser.add_argument("run_file", type=Path)
    parser.add_argument("--node", default="")
    parser.add_argument("--model", action="store_true")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    options: Any = parser.parse_args()
    where = str(options.run_file)
    try:
        overrides = dict(pair.split("=", 1) for pair in options.set)
        config = run_file.on_this_machine(run_file.read(options.run_file, overrides), options.node)
        run_file.check_paths(config, where, options.node)
        rates = bench(config, options.node, where, _caches(config, options.node), with_model=options.model)
    except (TrainctlError, OSError) as error:
        print(first_line(error), file=sys.stderr)
        return 2
    print(msgspec.json.encode(rates).decode())
    return 0


def _caches(config: RunFile, node: str) -> Path:
    """Return a folder on the disk of the node's token caches, if it has any yet."""
    usual = node_directory(node) / "data"
    folder = run_file.cache_folder(config, node, usual if node and usual.is_dir() else Path(tempfile.gettempdir()))
    folder.mkdir(exist_ok=True)
    return folder


if __name__ == "__main__":
    sys.exit(main())
