"""`python -m tests.trainer.support.step_peaks RUN.toml NODE 1,2,4`: the peak memory of steps by micro-batch.

Prints a JSON object: the bytes that the process held at most in a step, for each micro-batch in the order given. It is
the median of three steps after another.
"""

import json
import statistics
import sys
from pathlib import Path

import numpy as np

from trainctl.protocol.config import run_file
from trainctl.trainer.backends.base import Backend
from trainctl.trainer.backends.host_memory import KernelPeak
from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches

STEPS, FIRST = 3, 1
"""Steps that count, and those before, in which the allocator's cache fills."""


def step(backend: Backend, micro: int, length: int) -> None:
    """Of one micro-batch."""
    blocks = np.random.default_rng(micro).integers(0, 200, (micro, length + 1), dtype=np.int32)
    backend.forward(batches.from_blocks(blocks), 1.0)
    backend.backward()
    backend.accumulate()
    backend.gradient_norm()
    backend.update(1e-3, 1.0)
    backend.clear()


def main() -> None:
    """Of a rank's model and optimizer."""
    node = sys.argv[2]
    config = run_file.on_node(run_file.read(Path(sys.argv[1])), node)
    backend, kept, length = load(config, config.nodes[node], "run.toml"), KernelPeak(), config.data.sequence_length
    step(backend, 1, length)  # it makes the optimizer's state
    found: dict[int, float] = {}
    for micro in map(int, sys.argv[3].split(",")):
        backend.discard()  # what the allocator keeps of the size before
        peaks = []
        for _ in range(FIRST + STEPS):
            kept.reset()
            step(backend, micro, length)
            peaks.append(kept.read().peak_bytes or 0)
        found[micro] = statistics.median(peaks[FIRST:])
    print(json.dumps(found))


if __name__ == "__main__":
    main()
