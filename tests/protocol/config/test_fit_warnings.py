"""What is warned of before a run, by the model's sizes."""

from typing import Any

import pytest

from trainctl.protocol.config import run_file
from trainctl.protocol.config.fit_warnings import fit_warnings
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import RunFile

FACTS = ModelFacts(
    "llama", {"model.layers.0.self_attn.q_proj.weight": (64, 64), "model.layers.0.self_attn.k_proj.weight": (16, 64)},
    64, 128, 1, 4, 300, 128,
)  # fmt: skip


@pytest.mark.parametrize(
    ("length", "adapter", "says"),
    [
        (128, {}, []),
        (129, {}, ["data.sequence_length 129 is above the 128 positions"]),
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
    assert_warned(config, says)


@pytest.mark.parametrize(("objective", "adapter", "says"), [
    ("dpo", {}, ["evaluations of a dpo run that trains all weights don't measure eval/kl, so the alert kl can't open"]),
    ("dpo", {"kind": "lora", "rank": 4}, []),
    ("orpo", {}, []),
    ("sft", {}, []),
])  # fmt: skip
def test_a_divergence_that_is_not_measured(objective: str, adapter: dict[str, Any], says: list[str]) -> None:
    config = run_file.parse(
        {
            "run": {"name": "r", "steps": 2}, "model": {"path": "m"}, "batch": {"global": 8}, "adapter": adapter,
            "data": {"path": "d", "kind": "rows", "sequence_length": 64}, "objective": {"kind": objective},
            "optimizer": {"learning_rate": 1e-3},
        }
    )  # fmt: skip
    assert_warned(config, says)


def assert_warned(config: RunFile, says: list[str]) -> None:
    found = fit_warnings(config, FACTS, "r.toml")
    assert [line[: len(said)] for line, said in zip(found, says, strict=True)] == says
