"""Training whose weights are rounded by chance."""

from collections.abc import Callable
from typing import Any

import numpy as np

from trainctl.trainer.backends.load import load
from trainctl.trainer.data import batch as batches


def trained(run_file: Callable[..., Any], backend: str, updates: int = 3, **changes: Any) -> Any:
    config = run_file(nodes__here={"backend": backend, "device": "cpu", "threads": 1}, **changes)
    made = load(config, config.nodes["here"], "run.toml")
    go_on(made, 0, updates)
    return made


def go_on(backend: Any, first: int, updates: int) -> None:
    for step in range(first, first + updates):
        backend.clear()
        for part in range(2):
            blocks = np.random.default_rng(2 * step + part).integers(0, 200, (3, 21), dtype=np.int32)
            backend.forward(batches.from_blocks(blocks), 1 / 60)
            backend.backward()
            backend.accumulate()
        backend.update(1e-2, 1.0)
