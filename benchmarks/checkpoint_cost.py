"""Cost of a checkpoint in the background to the training loop: the copy over one memcpy of the same arrays, and the
steps while it is written over the other steps.

One rank on the CPU trains a small Llama by the product's own backend; copy and memcpy alternate, and so do steps with
and without a write. Prints each figure as soon as it is known, then one JSON line; exits 1 if a bar is missed.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from lib.ratios import interval

from trainctl.protocol.config import run_file
from trainctl.protocol.machine.file_digests import model_digests
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.checkpoints.checkpointer import Checkpointer
from trainctl.trainer.checkpoints.saver import Saver
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.step.progress import Progress
from trainctl.trainer.step.rank import Identity, Rank

MOST_COPY, MOST_STEP, MOST_LATE_STEP = 1.1, 1.05, 1.2
"""Bars: the copy over a memcpy, and the median and the 95th percentile of steps while a checkpoint is written, over the
median of the other steps."""
CACHE_BYTES = 256 << 20
"""More than a processor's cache."""
LONGEST_SECONDS = 120.0
"""After this the steps measured so far are what counts."""


class BenchedRank:
    """A loaded rank, with all that its checkpoints need."""

    def __init__(self, folder: Path, hidden: int, backend: str) -> None:
        demo_assets.make_model(folder / "model", demo_assets.llama_config(hidden=hidden))
        (folder / "text").mkdir()
        (folder / "text" / "a.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 2000, "utf-8")
        paths = RunPaths(folder / "run-1")
        paths.directory.mkdir()
        config = run_file.parse(
            {
                "run": {"name": "bench", "steps": 1000},
                "model": {"path": str(folder / "model")},
                "data": {"path": str(folder / "text"), "tokenizer": "bytes", "sequence_length": 64},
                "batch": {"global": 4, "micro": 4},
                "optimizer": {"learning_rate": 1e-3},
                "nodes": {"here": {"backend": backend, "device": "cpu", "threads": 1}},
            }
        )
        self.dataset = open_dataset(config, paths.directory / "data", "run.toml")
        self.backend, self.progress = load(config, config.nodes["here"], "run.toml"), Progress()
        who = Identity("run-1", "here", 0)
        status = StatusWriter(paths.status_page(0), os.getpid())
        rank = Rank(who, config, self.backend, self.dataset, self.progress, status, send=lambda message: None)
        self.saver = Saver(rank, config, paths, model_digests(folder / "model").whole)
        self._count = 0

    def step(self) -> float:
        """Seconds of one."""
        begun = time.perf_counter()
        self._count += 1
        batch = self.dataset.batch(np.arange(4 * self._count, 4 * self._count + 4) % self.dataset.samples)
        self.backend.clear()
        self.backend.loss_and_gradient(batch, {"tokens": 1.0}, adding=nullcontext())
        self.backend.sums()
        self.backend.gradient_norm()
        self.backend.update(1e-3, 1 / batch.weight)
        self.progress.load(self._count, 4 * self._count)
        return time.perf_counter() - begun


def copies(rank: BenchedRank, pairs: int) -> list[float]:
    """The copy over a memcpy of the same arrays into memory that was touched before. The cache is emptied before each,
    as the memcpy reads what the copy has written."""
    state = rank.saver.copy().state
    arrays = [array for part in (state.weights, *state.slots.values()) for array in part.values()]
    into, others = [array.copy() for array in arrays], np.ones(CACHE_BYTES, np.uint8)
    ratios = []
    for _ in range(pairs):
        others += 1
        begun = time.perf_counter()
        for array, other in zip(arrays, into, strict=True):
            np.copyto(other, array)
        plain = time.perf_counter() - begun
        others += 1
        ratios.append(rank.saver.copy().loop_seconds / plain)
    return ratios


def steps(rank: BenchedRank, writes: int) -> tuple[list[float], list[float]]:
    """Seconds of steps without a write and of those with one, in turns. Where no step is short enough to lie in a
    write, those that begin in one count."""
    checkpointer = Checkpointer("run-1", 0, rank.saver, lambda outcome: None)
    due = time.monotonic() + LONGEST_SECONDS
    free, busy, begun_in_it = list[float](), list[float](), list[float]()
    for number in range(writes):
        free += [rank.step() for _ in range(5)]
        checkpointer.copy(None)
        checkpointer.begin()
        while checkpointer.done_bytes is not None:
            seconds = rank.step()
            begun_in_it.append(seconds)
            busy += [seconds] if checkpointer.done_bytes is not None else []
        print(f"  write {number + 1}: {len(busy or begun_in_it)} steps meanwhile", flush=True)
        if time.monotonic() > due:
            break
    checkpointer.wait()
    return free, busy or begun_in_it


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--backend", choices=("torch", "mlx"), default="torch")
    parser.add_argument("--hidden", type=int, default=256, help="width of the model")
    parser.add_argument("--pairs", type=int, default=40, help="copies, each beside a memcpy")
    parser.add_argument("--writes", type=int, default=8, help="checkpoints that are written")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="checkpoint-cost-") as folder:
        rank = BenchedRank(Path(folder), options.hidden, options.backend)
        for _ in range(5):
            rank.step()
        size = rank.saver.copy().bytes
        found = interval(copies(rank, options.pairs))
        copy, ends = found["median"], f"{found['low']} to {found['high']}"
        print(f"copy of {size / 1e6:,.0f} MB over a memcpy: {copy} ({ends}; at most {MOST_COPY})", flush=True)
        free, busy = steps(rank, options.writes)
    usual = statistics.median(free)
    step, late = (float(np.quantile(busy, part)) / usual if busy else 1.0 for part in (0.5, 0.95))
    print(
        f"steps while it is written over others: {step:.3f} (at most {MOST_STEP}), 95th percentile {late:.3f} (at most"
        f" {MOST_LATE_STEP}); {len(busy)} and {len(free)} steps"
    )
    print(json.dumps({"bytes": size, "copy": found, "step": step, "late_step": late, "steps": [len(free), len(busy)]}))
    return int(copy > MOST_COPY or step > MOST_STEP or late > MOST_LATE_STEP)


if __name__ == "__main__":
    sys.exit(main())
