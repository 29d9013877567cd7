"""Gain of packing, length grouping and micro_tokens: tokens/s of one rank on short samples of unlike lengths.

    python -m benchmarks batching_speed [--backend torch|mlx] [--rounds N] [--threads N] [--sequence N]
        [--clock wall|cpu]

Four ways to process the same samples, in turns: in the order of their positions, padded (plain); the longest of each
global batch first (grouped); the same with passes filled up to micro_tokens (filled); and packed, also filled. Each
uses the trainer's own micro-batches and backend, without agent and optimizer. Tokens are the samples' own, without
padding. On a busy machine, --clock cpu counts the process's CPU time instead. Prints a table, then one JSON line with
the medians of the ratios to plain in the same round.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
from lib.ratios import interval

from trainctl.protocol.config import run_file
from trainctl.protocol.messages import Generation, Range, RankWork, StepPlan
from trainctl.trainer import demo_assets
from trainctl.trainer.backends.load import load
from trainctl.trainer.data.dataset import Dataset, open_dataset
from trainctl.trainer.data.permutation import Indices, samples_at
from trainctl.trainer.step.micro_batches import FittingLimits, MicroBatchQueue

SAMPLES, GLOBAL_BATCH, MICRO_BATCH = 4000, 32, 8
MEDIAN_TOKENS, SPREAD = 60, 0.8
"""Median and spread of the samples' lengths, which are log-normal, like those of instruction data."""
PLAN = StepPlan(
    run="bench",
    generation=Generation(1, 1),
    seq=1,
    kind="measure",
    step=1,
    plan_version=1,
    cursor=0,
    global_batch=GLOBAL_BATCH,
    work=(),
    learning_rate=0.0,
    divisor=1024.0,
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", choices=["torch", "mlx"], default="torch")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rounds = measure(Path(folder), options)
    names = [*rounds[0]]
    print(f"{'round':>5}" + "".join(f"{name:>12}" for name in names) + "   tokens/s")
    for number, row in enumerate(rounds, 1):
        print(f"{number:>5}" + "".join(f"{row[name]:>12,.0f}" for name in names))
    ratios = {name: interval([row[name] / row["plain"] for row in rounds]) for name in names[1:]}
    print(
        json.dumps({"backend": options.backend, "sequence": options.sequence, "clock": options.clock, "ratios": ratios})
    )
    return 0


def measure(folder: Path, options: argparse.Namespace) -> list[dict[str, float]]:
    """Tokens/s of each side by round; the sides take turns in being first."""
    demo_assets.make_model(folder / "model", demo_assets.llama_config(), seed=1)
    write_samples(folder / "samples.jsonl", options.sequence)
    plain, packed = (config(folder, options, packing) for packing in ("none", "best-fit"))
    clock = time.process_time if options.clock == "cpu" else time.perf_counter
    backend = load(packed, packed.nodes["bench"], "bench")
    samples, packs = (open_dataset(one, folder / "tokens", "bench") for one in (plain, packed))
    tokens = MICRO_BATCH * MEDIAN_TOKENS
    each = round(GLOBAL_BATCH * packs.samples / samples.samples)
    sides = {
        "plain": Side(backend, samples, GLOBAL_BATCH, 0, sort=False),
        "grouped": Side(backend, samples, GLOBAL_BATCH, 0, sort=True),
        "filled": Side(backend, samples, GLOBAL_BATCH, max(tokens, options.sequence), sort=True),
        "packed": Side(backend, packs, each, max(tokens, options.sequence), sort=True),
    }
    for side in sides.values():
        side.tokens_per_second(clock)
    rounds = []
    for number in range(options.rounds):
        names = [*sides][number % len(sides) :] + [*sides][: number % len(sides)]
        got = {name: sides[name].tokens_per_second(clock) for name in names}
        rounds.append({name: got[name] for name in sides})
    return rounds


class Side:
    """One way to cut a global batch into passes."""

    def __init__(self, backend: Any, dataset: Dataset, batch: int, micro_tokens: int, *, sort: bool) -> None:
        self._backend, self._dataset, self._batch = backend, dataset, batch
        self._fitting = FittingLimits(micro_tokens)
        self._lengths: Callable[[Indices], Indices] = self._targets if sort else np.zeros_like
        self._micro = batch if micro_tokens else MICRO_BATCH
        self._cursor = 0

    def tokens_per_second(self, clock: Callable[[], float]) -> float:
        """Return the tokens per second of the next global batch."""
        work = RankWork(0, (Range(self._cursor, self._batch),), self._micro)
        self._cursor += self._batch
        self._backend.clear()
        tokens, begun = 0, clock()
        queue = MicroBatchQueue(self._fitting, PLAN, work, self._lengths)
        while queue.pieces:
            batch = self._dataset.batch(self._samples(queue.pieces[0]))
            self._backend.loss_and_gradient(batch, {"tokens": 1 / PLAN.divisor}, adding=nullcontext())
            tokens += batch.tokens
            queue.done()
        return tokens / (clock() - begun)

    def _samples(self, positions: Indices) -> Indices:
        return samples_at(positions, self._dataset.samples, 0)

    def _targets(self, positions: Indices) -> Indices:
        return self._dataset.targets(self._samples(positions))


def config(folder: Path, options: argparse.Namespace, packing: str) -> Any:
    data = {"path": str(folder / "samples.jsonl"), "kind": "samples", "sequence_length": options.sequence}
    return run_file.parse(
        {
            "run": {"name": "bench", "steps": 1_000_000},
            "model": {"path": str(folder / "model")},
            "data": data | {"packing": packing, "held_out": 0.0},
            "batch": {"global": GLOBAL_BATCH},
            "optimizer": {"learning_rate": 1e-3},
            "nodes": {"bench": {"backend": options.backend, "device": "cpu", "threads": options.threads}},
        }
    )


def write_samples(path: Path, longest: int) -> None:
    chance = np.random.default_rng(0)
    lengths = np.clip(chance.lognormal(np.log(MEDIAN_TOKENS), SPREAD, SAMPLES), 4, longest + 1).astype(int)
    rows = [{"tokens": chance.integers(32, 127, length).tolist()} for length in lengths]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
