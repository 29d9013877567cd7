"""Mixtures of experts: what adapters are attached to, what `check` says of the rest, and the router's own loss."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.protocol.support.run_files import good

from trainctl.protocol.batch.settings_rules import fit_warnings
from trainctl.protocol.config import run_file
from trainctl.protocol.config.adapted_layers import adapted_layers
from trainctl.protocol.config.families import check_objective
from trainctl.protocol.config.model_facts import ModelFacts
from trainctl.protocol.config.run_tables import AdapterTable
from trainctl.protocol.errors import InvalidInputError

ATTENTION = {f"self_attn.{name}_proj.weight": (64, 64) for name in "qkvo"}
SHARED = {f"mlp.shared_expert.{name}_proj.weight": (64, 64) for name in ("up", "down")}
BLOCKS = {
    "mixtral": {
        "block_sparse_moe.gate.weight": (4, 64),
        **{f"block_sparse_moe.experts.{number}.w{part}.weight": (64, 64) for number in range(4) for part in (1, 2, 3)},
    },
    "qwen2_moe": {
        "mlp.gate.weight": (4, 64), "mlp.experts.0.up_proj.weight": (64, 64), **SHARED,
        "mlp.shared_expert_gate.weight": (1, 64),
    },
    "qwen2_moe in memory": {"mlp.gate.weight": (4, 64), "mlp.experts.gate_up_proj": (4, 128, 64), **SHARED},
    "granitemoe": {
        "block_sparse_moe.router.layer.weight": (4, 64), "block_sparse_moe.input_linear.weight": (4, 128, 64),
        "block_sparse_moe.output_linear.weight": (4, 64, 64),
    },
    "hunyuan_v1_moe": {
        "mlp.gate.wg.weight": (4, 64), "mlp.experts.0.up_proj.weight": (64, 64),
        "mlp.experts.1.up_proj.weight": (64, 64),
    },
    "stacked without layers": {"moe.gate.wg.weight": (4, 64), "moe.w1": (4, 128, 64), "moe.w2": (4, 64, 64)},
    "gpt_oss": {
        "mlp.router.weight": (4, 64), "mlp.experts.gate_up_proj": (4, 64, 128), "mlp.experts.down_proj_bias": (4, 64),
    },
}  # fmt: skip
"""Weights beside attention as their families store them."""
BOTH = ("experts", "routers")


def stored(block: str) -> dict[str, tuple[int, ...]]:
    return {f"model.layers.0.{name}": shape for name, shape in {**ATTENTION, **BLOCKS[block]}.items()}


@pytest.mark.parametrize(("block", "more"), [
    ("mixtral", []), ("granitemoe", []), ("gpt_oss", []), ("qwen2_moe in memory", [*SHARED]),
    ("hunyuan_v1_moe", []), ("stacked without layers", []),
    ("qwen2_moe", [*SHARED, "mlp.shared_expert_gate.weight"]),
])  # fmt: skip
def test_linear_leaves_out_experts_and_their_router(block: str, more: list[str]) -> None:
    found = adapted_layers(AdapterTable(kind="lora"), stored(block), "r.toml")
    wanted = {f"model.layers.0.{name.removesuffix('.weight')}" for name in (*ATTENTION, *more)}
    assert (set(found.shapes), found.left_out) == (wanted, BOTH)


def test_a_gate_without_experts_is_a_linear_layer() -> None:
    shapes = {"model.layers.0.mlp.gate.weight": (64, 64), "model.layers.0.mixer.conv1d.weight": (64, 1, 4)}
    found = adapted_layers(AdapterTable(kind="lora"), shapes, "r.toml")
    assert (set(found.shapes), found.left_out) == ({"model.layers.0.mlp.gate"}, ())


@pytest.mark.parametrize(("target", "part"), [("w1", "experts"), ("gate", "routers")])
def test_adapters_of_experts_by_name_are_refused(target: str, part: str) -> None:
    with pytest.raises(InvalidInputError, match=f"can't be attached to {part}; choose from k_proj, o_proj"):
        adapted_layers(AdapterTable(kind="lora", targets=(target,)), stored("mixtral"), "r.toml")


@pytest.mark.parametrize(("adapter", "says"), [
    ({"kind": "lora"}, "the experts and routers aren't trained, because adapters can't be attached to them; "
                       "k_proj, o_proj, q_proj, v_proj are (4 layers). "),
    ({"kind": "lora", "targets": ["q_proj"]}, "the experts and routers aren't trained"),
    ({}, "router_aux_loss_coef 0.02 of config.json has no effect without output_router_logits"),
])  # fmt: skip
def test_check_says_what_is_trained(adapter: dict[str, Any], says: str) -> None:
    facts = ModelFacts("mixtral", stored("mixtral"), 64, 64, 1, 4, 300, 4096, router_loss=0.02)
    lines = fit_warnings(run_file.parse(good() | {"adapter": adapter}), facts, "r.toml")
    assert [line for line in lines if line.startswith(says)], lines


@pytest.mark.parametrize(("stated", "weight"), [
    ({"output_router_logits": True, "router_aux_loss_coef": 0.02}, "0.02"),
    ({"output_router_logits": True}, "1"),
    ({"text_config": {"output_router_logits": True, "router_aux_loss_coef": 0.5}}, "0.5"),
    ({"output_router_logits": True, "router_aux_loss_coef": 0.0}, None),
    ({"output_router_logits": False, "router_aux_loss_coef": 0.02}, None),
])  # fmt: skip
def test_a_router_s_loss_that_transformers_would_add_is_refused(
    tmp_path: Path, stated: dict[str, Any], weight: str | None
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral", **stated}), "utf-8")
    if weight is None:
        check_objective(tmp_path, "sft", 64, "r.toml")
        return
    with pytest.raises(InvalidInputError) as caught:
        check_objective(tmp_path, "sft", 64, "r.toml")
    assert caught.value.where == "r.toml: model.path"
    assert f"(router_aux_loss_coef {weight})" in caught.value.problem
    assert caught.value.problem.endswith("set output_router_logits to false there")


def test_a_router_that_draws_experts_at_random_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "phimoe"}), "utf-8")
    with pytest.raises(InvalidInputError, match=r"^r.toml: model.path: phimoe's router draws experts at random"):
        check_objective(tmp_path, "sft", 64, "r.toml")
