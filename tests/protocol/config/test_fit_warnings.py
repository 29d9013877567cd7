"""What is warned of before a run, by the model's sizes."""

from typing import Any

import pytest

from trainctl.protocol.config import run_file
from trainctl.protocol.config.fit_warnings import fit_warnings
from trainctl.protocol.config.model_facts import ModelFacts

FACTS = ModelFacts(
    "llama", {"model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.self_attn.k_proj.weight": (16, 64)},
    64, 128, 1, 4, 300, 128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("length", "adapter", "says"),
    [
        (128, {}, []),
        (129, {}, ["data.sequence_length 129 is above the model's max_position_embeddings 128"]),
        (64, {"kind": "lora", "rank": 15}, []),
        (64, {"kind": "lora", "rank": 16}, ["adapter.rank 16 is not below the smaller dimension of k_proj, 16"]),
        (64, {"kind": "lora", "rank": 16, "targets": ["q_proj"]}, []),
        (64, {"rank": 16}, []),
    ],
)
def test_what_rarely_does_what_is_meant(length: int, adapter: dict[str, Any], says: list[str]) -> None:
    config = run_file.parse(
        {
            "run": {"name": "r", "steps": 2}, "model": {"path": "m"}, "data": {"path": "d", "sequence_length": length},
            "batch": {"global": 8}, "optimizer": {"learning_rate": 1e-3}, "adapter": adapter,
        }
    )  # fmt: skip
    found = fit_warnings(config, FACTS, "r.toml")
    assert [line[: len(said)] for line, said in zip(found, says, strict=True)] == says
