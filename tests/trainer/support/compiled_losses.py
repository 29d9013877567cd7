"""`python -m tests.trainer.support.compiled_losses RUN.toml ROWSxLENGTH ...`: a model with compiled layers and without.

Prints a JSON line: by size the relative differences of loss and gradient, and whether an evaluation has the same bits;
the compiler's seconds, the graphs that were compiled, and the processes that it left.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil

from trainctl.protocol.config import run_file
from trainctl.trainer.adapters.dropout import token_keys
from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches


def loss_and_gradient(backend: Any, given: batches.Batch) -> tuple[float, Any]:
    backend.clear()
    backend.forward(given, 1.0)
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


def main() -> None:
    """Of the node "here"."""
    config = run_file.read(Path(sys.argv[1]))
    off = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, compile="off"))
    plain, compiled = (load(one, one.nodes["here"], "run.toml") for one in (off, config))
    found: dict[str, Any] = {"sizes": {}, "mode": compiled.compute.compile}
    for size in sys.argv[2:]:
        given = batch(*map(int, size.split("x")))
        (loss, gradient), (other, same) = (loss_and_gradient(one, given) for one in (plain, compiled))
        apart = float(np.linalg.norm(same - gradient) / np.linalg.norm(gradient))
        equal = plain.evaluate(given).losses == compiled.evaluate(given).losses
        found["sizes"][size] = [abs(other / loss - 1), apart, equal]
        found.setdefault("seconds", compiled.compile_meter.seconds)
    found |= {"graphs": compiled.compile_meter.graphs, "left": len(psutil.Process().children())}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
