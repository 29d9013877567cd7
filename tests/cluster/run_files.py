"""Run files of the small runs that tests of agents train, and the model and text that they name."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainctl.trainer import demo_assets

NODE = "box"
NODES = ("alpha", "beta", "gamma")
FOREVER = 100_000
TORCH = {"backend": "torch", "device": "cpu", "threads": 1}
RING = {"engine": "ring"}


def make_small_assets(folder: Path) -> Path:
    """Make a Llama of 27 k parameters and text with some structure, so that a step takes some 10 ms."""
    shape = demo_assets.llama_config(hidden=32, layers=2, heads=2, intermediate=64)
    demo_assets.make_model(folder / "model", shape, seed=7)
    words = ["def", "return", "import", "self", "value", "(", ")", ":", "\n    ", "for", "in", "range", "x"]
    (folder / "text").mkdir()
    (folder / "text" / "a.txt").write_text(" ".join(random.Random(5).choices(words, k=4000)), encoding="utf-8")
    return folder


def small_run(assets: Path, **changes: Any) -> dict[str, Any]:
    """Return a run file as parsed, `table__key` changes laid over it, or whole tables replaced."""
    raw: dict[str, Any] = {
        "run": {"name": "small", "steps": 30, "seed": 3, "orphan_seconds": 300},
        "model": {"path": str(assets / "model")},
        "data": {"path": str(assets / "text"), "tokenizer": "bytes", "sequence_length": 24, "held_out": 0.05},
        "batch": {"global": 12, "micro": 4},
        "optimizer": {"learning_rate": 3e-3, "weight_decay": 0.1, "warmup_steps": 3},
        "checkpoint": {"at_end": False},
        "calibration": {"seconds": 12},
        "nodes": {NODE: dict(TORCH)},
    }
    changes["policy"] = {"rebalance": {"mode": "off"}, **changes.get("policy", {})}  # shares stay as tests set them
    return with_changes(raw, changes)


def with_changes(raw: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay `table__key` changes over a run file as parsed, or replace whole tables, and return it."""
    for name, value in changes.items():
        table, _, key = name.partition("__")
        if key:
            raw.setdefault(table, {})[key] = value
        else:
            raw[table] = value
    return raw


def on(*nodes: str, **tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the [nodes.*] tables of a run file for torch ranks of one thread, in this order."""
    return {node: {**TORCH, **tables.get(node, {})} for node in nodes}


def on_mlx(*nodes: str, **tables: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the same for MLX ranks. Alone or on ring one starts in less than half the CPU time of torch's: for tests
    that aren't about a library."""
    return on(*nodes, **{node: {"backend": "mlx", **tables.get(node, {})} for node in nodes})
