"""Settings and sizes of micro-batches whose layers are compiled."""

from typing import Any

from tests.tiers import is_soak

ALL = is_soak()
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
