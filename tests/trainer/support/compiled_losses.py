"""`python -m tests.trainer.support.compiled_losses RUN.toml ROWSxLENGTH ...`: a model with compiled layers and without.

Prints a JSON line: by size the relative differences of loss and gradient, and whether an evaluation has the same bits;
these differences of a step of all sizes; the compiler's seconds, the graphs that were compiled, the lengths that rows
were padded to, the CUDA graphs that were recorded, and the processes that it left.
"""

import dataclasses
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from tests.lacking import ROOT
from tests.trainer.support.passes import blocks, loss_and_gradient
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import run_file
from trainctl.trainer.adapters.lora import token_keys
from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches

LORA = {"adapter": {"kind": "lora", "rank": 4, "dropout": 0.1}}
SAVING = {"model__gradient_checkpointing": "all", "model__chunked_loss": "on"}
RAGGED = ("4x20", "3x17", "2x9", "1x8", "1x20")
CASES: dict[str, tuple[dict[str, Any], tuple[str, ...], float]] = {
    "full": ({}, ("4x20",), 1e-5),
    "ragged": ({"data__kind": "rows"}, RAGGED, 1e-5),
    "ragged lora": (LORA | {"data__kind": "rows"}, RAGGED, 1e-5),
    "saving": (SAVING, RAGGED, 1e-5),
    "saving lora": (LORA | SAVING, RAGGED, 1e-5),
    "bfloat16": ({"model__dtype": "bfloat16"}, RAGGED, 2e-2),
    "autotuned": ({"model__compile": "max-autotune"}, ("4x20",), 1e-5),
}
"""Changes of the run file, sizes of micro-batches, and the tolerance of a gradient."""
PASSES = 3
"""Passes of each size: a CUDA graph is recorded in a later pass than the first, and only then replayed."""


def compare(run: Path, sizes: Sequence[str], cache: Path, **environment: str) -> dict[str, Any]:
    """Return what this module prints of a run file, in a process of its own that keeps compiled code in a folder."""
    words = [sys.executable, "-m", "tests.trainer.support.compiled_losses", str(run), *sizes]
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONFAULTHANDLER": "1", **environment}
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=3 * HANG_SECONDS, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], loss_tolerance: float, tolerance: float) -> None:
    for size, (loss, gradient, equal) in found["sizes"].items():
        assert loss < loss_tolerance and gradient < tolerance, size
        assert equal, "evaluations aren't compiled"
    assert found["together"][0] < loss_tolerance and found["together"][1] < tolerance, "a pass overwrote another's"
    assert found["seconds"] > 0
    assert 1 <= found["graphs"] <= found["limit"]
    assert found["left"] == 0, "no process outlives a trainer that is killed"


def batch(rows: int, length: int) -> batches.Batch:
    """Make a micro-batch with the keys of dropout, and some targets that don't count."""
    made = blocks(rows, length, seed=length)
    made.counted[0, : length // 2] = 0
    return dataclasses.replace(made, keys=token_keys(1, np.arange(rows), length))


def apart(plain: Any, compiled: Any, *given: batches.Batch) -> list[float]:
    """Return relative differences of loss and gradient."""
    (loss, gradient), (other, same) = (loss_and_gradient(one, *given) for one in (plain, compiled))
    one, two = (np.concatenate([array.ravel() for array in arrays.values()]) for arrays in (gradient, same))
    return [abs(other / loss - 1), float(np.linalg.norm(two - one) / np.linalg.norm(one))]


def recorded_graphs(device: str) -> int:
    """Count those that this process holds of a CUDA device: they follow each other in trees."""
    if not device.startswith("cuda"):
        return 0
    from torch._inductor.cudagraph_trees import get_manager

    manager: Any = get_manager(int(device.split()[0].partition(":")[2]), create_if_none_exists=False)
    waiting = [] if manager is None else [*manager.get_roots()]
    count = 0
    while waiting:
        count += 1
        waiting += itertools.chain.from_iterable(waiting.pop().children.values())
    return count


def main() -> None:
    import torch

    config = run_file.read(Path(sys.argv[1]))
    off = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, compile="off"))
    plain, compiled = (load(one, one.nodes["here"], "run.toml") for one in (off, config))
    lengths = set[int]()
    layers = compiled._compiled  # type: ignore[attr-defined]

    def prepared(given: batches.Batch) -> batches.Batch:
        made: batches.Batch = type(layers).prepared(layers, given)
        lengths.add(made.inputs.shape[1])
        return made

    layers.prepared = prepared
    found: dict[str, Any] = {"sizes": {}, "mode": compiled.compute.compile}
    everything = [batch(*map(int, size.split("x"))) for size in sys.argv[2:]]
    for size, given in zip(sys.argv[2:], everything, strict=True):
        for _ in range(PASSES):
            differences = apart(plain, compiled, given)
        equal = plain.evaluate(given).losses == compiled.evaluate(given).losses
        found["sizes"][size] = [*differences, equal]
        found.setdefault("seconds", compiled.compile_meter.seconds)
    found["together"] = apart(plain, compiled, *everything)
    found |= {"graphs": compiled.compile_meter.graphs, "limit": torch._dynamo.config.recompile_limit}
    found |= {"lengths": sorted(lengths), "recorded": recorded_graphs(compiled.device.name)}
    found |= {"left": len(psutil.Process().children())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
