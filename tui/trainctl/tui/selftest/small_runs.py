"""Runs of the self-test: their run files, and what their records say."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import tomli_w

from trainctl.protocol import messages as m
from trainctl.protocol.record.reader import RecordReader

NODES: Final = ("a", "b")
SAMPLES: Final = 12
"""Samples of a step."""
MOST_STEPS: Final = 10_000
"""Steps of a run that is stopped long before; it ends by itself if this program is killed."""


def run_tables(
    assets: Path, nodes: Mapping[str, dict[str, Any]], steps: int, checkpoint_every: int = 0
) -> dict[str, Any]:  # fmt: skip
    """A run file of the self-test's model and text. Ranks keep their shares, and the learning rate doesn't depend on
    the number of steps, so that runs of different lengths have the same losses."""
    return {
        "run": {"name": "selftest", "steps": steps, "orphan_seconds": 20.0},
        "model": {"path": str(assets / "model")},
        "data": {"path": str(assets / "data"), "tokenizer": "bytes", "sequence_length": 64, "held_out": 0.0},
        "batch": {"global": SAMPLES, "micro": 4},
        "optimizer": {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "clip_norm": 1.0},
        "checkpoint": {"every_steps": checkpoint_every, "keep_last": 100, "at_end": False},
        "policy": {"rebalance": {"mode": "off"}},
        "nodes": {name: {"threads": 1, **table} for name, table in nodes.items()},
    }


def backend_table(backend: str) -> dict[str, Any]:
    """The [nodes.NAME] table of a rank, with the same bits each time."""
    return {"backend": backend, **({"deterministic": True} if backend == "torch" else {})}


def losses(view: m.RunView, first: int = 1, last: int = MOST_STEPS) -> dict[int, float | None]:
    """The loss of each recorded step of a run, from `first` to `last`."""
    with RecordReader(Path(view.directory)) as record:
        steps, _ = record.steps(first - 1, 500)
    return {one.step: one.loss for one in steps if one.step <= last}


def parts(view: m.RunView, first: int, last: int) -> Sequence[m.RankStep]:
    """Each rank's part of the steps from `first` to `last`."""
    with RecordReader(Path(view.directory)) as record:
        return record.parts_between(first, last)


def write_tables(path: Path, tables: dict[str, Any]) -> None:
    """Write a run file."""
    path.write_bytes(tomli_w.dumps(tables).encode())
