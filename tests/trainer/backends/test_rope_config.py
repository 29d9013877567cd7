"""Both layouts of RoPE from either of them, without a model."""

import copy
import json
from typing import Any

import pytest

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.model import rope_config
from trainctl.trainer.model.rope_config import both_layouts, for_mlx

LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
FACTORS = {"short_factor": [1.0, 2.0], "long_factor": [3.0, 4.0]}
LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 4096, **FACTORS}
LINEAR = {"rope_type": "linear", "factor": 8.0}
LAYERS = ["sliding_attention"] * 5 + ["full_attention"]
PLAIN = {"rope_type": "default", "rope_theta": 5e5}


def gemma3(rope):
    return {"model_type": "gemma3_text", "layer_types": LAYERS, **rope}


def per_layer_type(full, local):
    return {"full_attention": full, "sliding_attention": local}


# name: (the new layout, the old layout, both), all beside the same rest
LAYOUTS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "theta": (
        {"model_type": "llama", "rope_parameters": PLAIN},
        {"model_type": "llama", "rope_theta": 5e5},
        {"rope_parameters": PLAIN, "rope_theta": 5e5, "rope_scaling": None},
    ),
    "llama3": (
        {"model_type": "llama", "rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
        {"model_type": "llama", "rope_theta": 5e5, "rope_scaling": LLAMA3},
        {
            "rope_parameters": {**LLAMA3, "rope_theta": 5e5},
            "rope_theta": 5e5,
            "rope_scaling": {**LLAMA3, "type": "llama3"},
        },
    ),
    "longrope, once su": (
        {"model_type": "phi3", "rope_parameters": {**LONGROPE, "rope_theta": 1e4}},
        {
            "model_type": "phi3", "rope_theta": 1e4, "rope_scaling": {"type": "su", **FACTORS},
            "original_max_position_embeddings": 4096,
        },
        {
            "rope_parameters": {**LONGROPE, "rope_theta": 1e4},
            "rope_theta": 1e4,
            "rope_scaling": {**LONGROPE, "type": "longrope"},
        },
    ),
    "gemma 3": (
        gemma3({"rope_parameters": per_layer_type({**LINEAR, "rope_theta": 1e6}, {**PLAIN, "rope_theta": 1e4})}),
        gemma3({"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": LINEAR}),
        {
            "rope_parameters": per_layer_type({**LINEAR, "rope_theta": 1e6}, {**PLAIN, "rope_theta": 1e4}),
            "rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6,
            "rope_scaling": {**LINEAR, "type": "linear"},
        },
    ),
    "gpt-neox": (
        {"model_type": "gpt_neox", "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
        {"model_type": "gpt_neox", "rotary_emb_base": 5e5, "rotary_pct": 0.25},
        {
            "rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25},
            "rotary_emb_base": 5e5, "rotary_pct": 0.25, "rope_scaling": None,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LAYOUTS)
def test_either_layout_gives_both(name):
    new, old, both = LAYOUTS[name]
    for config in (new, old):
        given = copy.deepcopy(config)
        assert both_layouts(config, "config.json") == config | both
        assert config == given, "it is the user's"
    assert both_layouts(new | both, "config.json") == new | both
    multimodal = {"model_type": "several", "text_config": old}
    assert both_layouts(multimodal, "config.json") == {**multimodal, "text_config": old | both}


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gpt2"},
        {"model_type": "llama", "rope_parameters": None, "rope_scaling": None},
        {"model_type": "gemma4_text", "rope_parameters": per_layer_type(PLAIN, {**PLAIN, "rope_theta": 1e4})},
    ],
    ids=["no RoPE", "nothing stated", "younger than the old layout"],
)
def test_what_states_no_theta_of_both_layouts_stays(config):
    assert both_layouts(config, "config.json") == config


def test_a_scaling_without_its_original_length_gets_what_transformers_takes():
    scaling = {key: value for key, value in LLAMA3.items() if key != "original_max_position_embeddings"}
    config = {"rope_theta": 5e5, "rope_scaling": scaling, "max_position_embeddings": 2048}
    for found in ("rope_parameters", "rope_scaling"):
        assert both_layouts(config, "config.json")[found]["original_max_position_embeddings"] == 2048


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("theta", {"rope_theta": 1e4}, "rope_theta = 500000.0, but the older keys have 10000.0"),
        ("llama3", {"rope_scaling": {**LLAMA3, "factor": 32.0}}, "factor = 8.0, but the older keys have 32.0"),
        ("theta", {"rope_scaling": LINEAR}, "rope_type = default, but the older keys have linear"),
        ("gemma 3", {"rope_local_base_freq": 2e4}, "rope_theta = 10000.0, but the older keys have 20000.0"),
        ("gpt-neox", {"rotary_pct": 1.0}, "partial_rotary_factor = 0.25, but the older keys have 1.0"),
        ("theta", {"rope_parameters": [5e5]}, r"rope_parameters is '\[500000.0\]', not a table"),
    ],
)
def test_layouts_that_contradict_each_other_are_refused(name, change, words):
    config = LAYOUTS[name][0] | change
    for refused in (config, {"model_type": "several", "text_config": config}):
        with pytest.raises(InvalidInputError, match=rf"^m/config\.json: .*{words}") as refusal:
            both_layouts(refused, "m/config.json")
        assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"model_type": "smollm3"}, {"rope_theta": 2e6}),
        ({"model_type": "qwen2", "rope_scaling": {"type": "linear", "factor": 2.0}}, {"rope_theta": 1e4}),
        ({"model_type": "gemma3_text"}, {"rope_theta": 1e6, "rope_local_base_freq": 1e4}),
        ({"model_type": "no-such-model"}, {}),
        ({"model_type": "gpt2"}, {}),
    ],
)
def test_a_theta_that_is_not_stated_is_the_one_of_transformers(tmp_path, config, theta):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    found = rope_config.read(tmp_path)
    assert {key: found.get(key) for key in ("rope_theta", "rope_local_base_freq") if key in found} == theta
    if "rope_scaling" in config:
        assert found["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 2.0}


def test_mlx_lm_is_given_the_short_factors_up_to_the_original_length():
    config = both_layouts(LAYOUTS["longrope, once su"][1], "config.json")
    assert for_mlx(config, 4096)["rope_scaling"]["long_factor"] == FACTORS["short_factor"]
    assert for_mlx(config, 4097) == config
    assert config["rope_scaling"]["long_factor"] == FACTORS["long_factor"]
    plain = both_layouts(LAYOUTS["llama3"][0], "config.json")
    assert for_mlx(plain, 16) == plain
