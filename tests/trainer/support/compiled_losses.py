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
from tests.waiting import HANG_SECONDS

from trainctl.protocol.config import run_file
from trainctl.trainer.adapters.dropout import token_keys
from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches

PASSES = 3
"""Of each size: a CUDA graph is recorded in a later pass than the first, and only then replayed."""


def compare(run: Path, sizes: Sequence[str], cache: Path, **environment: str) -> dict[str, Any]:
    """What this module prints of a run file, in a process of its own that keeps compiled code in a folder."""
    words = [sys.executable, "-m", "tests.trainer.support.compiled_losses", str(run), *sizes]
    variables = {**os.environ, "XDG_CACHE_HOME": str(cache), "PYTHONFAULTHANDLER": "1", **environment}
    done = subprocess.run(
        words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=3 * HANG_SECONDS, check=False
    )
    assert done.returncode == 0, f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def check(found: dict[str, Any], loss_tolerance: float, tolerance: float) -> None:
    """That compiled layers learn as others do, of what `compare` found."""
    for size, (loss, gradient, equal) in found["sizes"].items():
        assert loss < loss_tolerance and gradient < tolerance, size
        assert equal, "evaluations aren't compiled"
    assert found["together"][0] < loss_tolerance and found["together"][1] < tolerance, "a pass overwrote another's"
    assert found["seconds"] > 0
    assert 1 <= found["graphs"] <= found["limit"]
    assert found["left"] == 0, "no process outlives a trainer that is killed"


def loss_and_gradient(backend: Any, *given: batches.Batch) -> tuple[float, Any]:
    """Of a step of these micro-batches."""
    backend.clear()
    for one in given:
        backend.forward(one, 1.0)
        backend.backward()
        backend.accumulate()
    gradients = [array.ravel().copy() for array in backend.copy_of("accumulators").values()]
    return backend.totals().sums.losses["tokens"], np.concatenate(gradients)


def batch(rows: int, length: int) -> batches.Batch:
    """With the keys of dropout, and some targets that don't count."""
    tokens = np.random.default_rng(length).integers(0, 200, (rows, length + 1), dtype=np.int32)
    made = batches.from_blocks(tokens)
    made.counted[0, : length // 2] = 0
    return dataclasses.replace(made, keys=token_keys(1, np.arange(rows), length))


def apart(plain: Any, compiled: Any, *given: batches.Batch) -> list[float]:
    """Relative differences of loss and gradient."""
    (loss, gradient), (other, same) = (loss_and_gradient(one, *given) for one in (plain, compiled))
    return [abs(other / loss - 1), float(np.linalg.norm(same - gradient) / np.linalg.norm(gradient))]


def recorded_graphs(device: str) -> int:
    """Those that this process holds of a CUDA device: they follow each other in trees."""
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
    """Of the node "here"."""
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
    found |= {"lengths": sorted(lengths), "recorded": recorded_graphs(compiled.device)}
    found |= {"left": len(psutil.Process().children())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
