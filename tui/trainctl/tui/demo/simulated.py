"""The simulated cluster of `trainctl demo --simulated`: its machines, its model's shape, and its run file."""

import json
from collections.abc import Sequence
from typing import Any, Final

import tomli_w

from trainctl.protocol.config import run_file
from trainctl.protocol.files.durable_files import write_file
from trainctl.tui.demo.folder import Session

NODES: Final = 8
SLOW_STEPS, DEATH_STEP = (60, 140), 40
"""The second node runs at half its speed from the first step to the other; the last one's trainer dies in its step."""
SAMPLES_PER_NODE: Final = 32
WARMUP_STEPS: Final = 20
EVALUATE_EVERY: Final = 50
_MACHINES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("rtx4090", {"device": "rtx4090"}),
    ("rtx3090", {"device": "rtx3090"}),
    ("l4", {"device": "l4"}),
    ("mac", {"samples_per_second": 24.0, "pass_seconds": 0.01, "memory_gb": 24.0, "backend": "mlx"}),
)
_ALL: Final = {"link_gbit": 25.0, "load_seconds": 2.0, "noise": 0.03, "drift": 0.1}
_MODEL: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 12,
    "vocab_size": 32_000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}
"""Some 110 M parameters."""


def nodes(count: int, *, faults: bool = True) -> dict[str, dict[str, Any]]:
    """Return the tables [nodes.NAME.simulated] of so many machines, the lead's first."""
    tables = {}
    for number in range(count):
        name, machine = _MACHINES[number % len(_MACHINES)]
        tables[f"{name}-{number // len(_MACHINES) + 1}"] = _ALL | machine
    if faults and count > 1:
        slow, last = list(tables)[1], list(tables)[-1]
        changes = [{"step": step, "speed": speed} for step, speed in zip(SLOW_STEPS, (0.5, 1.0), strict=True)]
        tables[slow] = tables[slow] | {"speeds": changes}
        tables[last] = tables[last] | {"fails_at": [DEATH_STEP]}
    return tables


def write_files(session: Session, count: int, *, faults: bool = True) -> None:
    """Write the cluster file, and what stands for the model and the text."""
    tables = {name: {"simulated": table} for name, table in nodes(count, faults=faults).items()}
    write_file(session.cluster_file, tomli_w.dumps({"nodes": tables}).encode())
    model = session.folder / "model"
    model.mkdir()
    write_file(model / "config.json", json.dumps(_MODEL).encode())
    write_file(session.folder / "data.txt", 4096 * b"A simulated run reads no data.\n")


def run_config(session: Session, names: Sequence[str], steps: int) -> dict[str, Any]:
    """Return the run file as plain values, checked."""
    raw: dict[str, Any] = {
        "run": {"name": "demo", "steps": steps},
        "model": {"path": str(session.folder / "model"), "init": "random", "dtype": "bfloat16"},
        "data": {
            "path": str(session.folder / "data.txt"),
            "tokenizer": "bytes",
            "sequence_length": 1024,
            "held_out": 0.001,
        },
        "batch": {"global": SAMPLES_PER_NODE * len(names), "micro": 8},
        "optimizer": {
            "learning_rate": 6e-4,
            "schedule": "cosine",
            "warmup_steps": min(WARMUP_STEPS, steps - 1),
            "clip_norm": 1.0,
        },
        "evaluate": {"every_steps": EVALUATE_EVERY},
        "checkpoint": {"at_end": False},
        "nodes": {name: {"threads": 1} for name in names},
    }
    return run_file.to_dict(run_file.parse(raw, "demo"))
