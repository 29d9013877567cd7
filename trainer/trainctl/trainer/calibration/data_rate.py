"""How fast the run's data are read and assembled without training: first from the disk, then from memory."""

from pathlib import Path
from typing import Final

from trainctl.protocol.calibration.profile import DataRate
from trainctl.protocol.config.run_tables import RunFile
from trainctl.trainer.data.dataset import Dataset
from trainctl.trainer.data.permutation import Indices
from trainctl.trainer.data.token_cache import drop_pages
from trainctl.trainer.step.data_bench import MicroBatchReader

COLD_SECONDS: Final = 1.0
"""Most time for reading from the disk."""
WARM_SECONDS: Final = 0.5
"""Least time for reading from memory."""


def data_rate(config: RunFile, node: str, dataset: Dataset, caches: Path) -> DataRate:
    """Of a node's micro-batches, in the order of its steps."""
    reader = MicroBatchReader(config, node, dataset)
    is_cold = drop_pages(caches.rglob("*.bin"))
    first, pieces = reader.read(reader.pieces(), COLD_SECONDS)
    cold = _samples(pieces) / first.seconds if is_cold else None
    samples, seconds = 0, 0.0
    while seconds < WARM_SECONDS:
        again, done = reader.read(iter(pieces), WARM_SECONDS)
        samples, seconds = samples + _samples(done), seconds + again.seconds
    return DataRate(samples / seconds, cold)


def _samples(pieces: list[Indices]) -> int:
    return sum(map(len, pieces))
