"""Operations of a step by hand, and which part of a device's peak they are."""

import pytest

from trainctl.protocol.batch.flops import peak_parts, step_flops
from trainctl.protocol.calibration.profile import Pass, ProfileSummary
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import AdapterTable

PROFILE = ProfileSummary(created_at=0.0, passes=(Pass(1, 1.0),), gflops={"float32": 500.0, "bfloat16": 800_000.0})
H100 = "cuda:0 NVIDIA H100 80GB HBM3"
SHAPES = {
    "model.embed_tokens.weight": (100, 8), "lm_head.weight": (100, 8), "model.norm.weight": (8,),
    "model.layers.0.self_attn.q_proj.weight": (16, 8), "model.layers.0.self_attn.o_proj.weight": (8, 16),
}  # fmt: skip


def facts(shapes: dict[str, tuple[int, ...]], **other: int) -> ModelFacts:
    return ModelFacts("llama", shapes, 8, 32, 1, 2, 100, **other)


def test_a_model_by_hand() -> None:
    found = step_flops(AdapterTable(), facts(SHAPES), "run file")
    assert found == (6 * (800 + 128 + 128), 6 * 1 * 16)
    assert found.of(30, 3) == 30 * (6336 + 96 * 10)
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert step_flops(AdapterTable(), facts(tied), "run file") == found, "a tied head counts once"
    experts = facts({**SHAPES, "model.layers.0.mlp.experts.0.up_proj.weight": (8, 8)})
    for unknown in (None, facts(SHAPES, crossing=1), experts):
        assert step_flops(AdapterTable(), unknown, "run file") is None


def test_the_part_of_a_peak_is_of_the_data_type_that_is_computed_in() -> None:
    assert peak_parts(100e9, "cpu", "float32", PROFILE) == {"matmul_use": pytest.approx(0.2)}
    both = peak_parts(400e12, H100, "bfloat16", PROFILE)
    assert both == {"matmul_use": pytest.approx(0.5), "mfu": pytest.approx(400 / 989)}
    assert peak_parts(1e12, "cpu", "float16", PROFILE) == {}
    assert peak_parts(1e12, "cpu", "float32", None) == {}
