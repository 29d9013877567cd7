"""Tiny random models of each family: how transformers 5 states them, and how transformers 4 wrote the same."""

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 256, "initializer_range": 0.2, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}  # fmt: skip
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [4.0, 6.0, 8.0, 12.0]}
YARN = {
    "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32,
    "max_position_embeddings": 128, "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
WINDOWS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}


@dataclasses.dataclass
class Family:
    """A model's RoPE in both layouts; `old` is None for families that are younger than transformers 5."""

    kind: str
    rope: dict[str, Any]
    old: dict[str, Any] | None
    others: dict[str, Any] = dataclasses.field(default_factory=dict)

    def config(self, **changes: Any) -> Any:
        import transformers

        settings = json.loads(json.dumps({**SMALL, "rope_parameters": self.rope, **self.others, **changes}))
        return transformers.AutoConfig.for_model(self.kind, **settings)


def theta(kind: str, value: float, **others: Any) -> Family:
    return Family(kind, {"rope_type": "default", "rope_theta": value}, {"rope_theta": value}, others)


def partial(kind: str, value: float, factor: float, **others: Any) -> Family:
    """Only some of a head's dimensions are rotated."""
    old = {"rope_theta": value, "partial_rotary_factor": factor}
    return Family(kind, {"rope_type": "default", **old}, old, others)


FAMILIES = {
    "llama": theta("llama", 5e5),
    "llama3": Family("llama", {**LLAMA3, "rope_theta": 5e5}, {"rope_theta": 5e5, "rope_scaling": LLAMA3}),
    "mistral": theta("mistral", 1e6),
    "phi3": partial("phi3", 5e5, 0.5),
    "phi3-longrope": Family(
        "phi3",
        {"rope_type": "longrope", "rope_theta": 5e5, "partial_rotary_factor": 0.5, **FACTORS},
        {"rope_theta": 5e5, "partial_rotary_factor": 0.5, "rope_scaling": {"type": "su", **FACTORS}},
        {"original_max_position_embeddings": 64},
    ),
    "qwen2": theta("qwen2", 1e6),
    "qwen2-10000": theta("qwen2", 1e4),  # what transformers writes for a model made from its defaults
    "qwen3": theta("qwen3", 1e6, head_dim=16),
    "smollm3": theta("smollm3", 2e6, no_rope_layers=[1, 0]),
    "gemma2": theta("gemma2", 1e4, head_dim=16, query_pre_attn_scalar=16),
    "gemma3": Family(
        "gemma3_text",
        {
            "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        {
            "rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
            "sliding_window_pattern": 2,
        },
        {
            "hidden_size": 64,  # mlx-lm rounds its root to bfloat16, transformers to the weights' type: here both are 8
            "head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWS,
        },
    ),
    "cohere": theta("cohere", 8e6, logit_scale=0.5),
    "gemma": theta("gemma", 2e4, hidden_size=64, head_dim=16),
    "gemma4": Family(
        "gemma4_text",
        {
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        },
        None,
        {
            "hidden_size": 64, "head_dim": 16, "global_head_dim": 32, "num_hidden_layers": 4,
            "sliding_window": 8, "layer_types": WINDOWS["layer_types"] * 2, "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "num_kv_shared_layers": 2,
        },
    ),
    "glm4": partial("glm4", 2e4, 0.5, head_dim=16),
    "granite": theta(
        "granite", 1e5, embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.7,
        attention_multiplier=0.2,
    ),
    "ministral3": Family("ministral3", YARN, None, {"head_dim": 16}),
    "olmo2": theta("olmo2", 5e5),
    "olmo3": Family(
        "olmo3",
        {name: {"rope_type": "default", "rope_theta": 2e4} for name in WINDOWS["layer_types"]},
        {"rope_theta": 2e4},
        WINDOWS,
    ),
    "phi": partial("phi", 2e4, 0.5),
    "stablelm": partial("stablelm", 2e4, 0.25),
    "starcoder2": theta("starcoder2", 1e5),
}  # fmt: skip
"""By a name of the test's."""
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
GROUPED = {**ROUTED, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "num_key_value_heads": 2,
}  # fmt: skip
MIXTURES = {
    "mixtral": theta("mixtral", 1e6, num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": theta("qwen2_moe", 1e6, num_experts=4, shared_expert_intermediate_size=40, **ROUTED),
    "qwen3_moe": theta("qwen3_moe", 1e6, num_experts=4, head_dim=16, **ROUTED),
    "olmoe": theta("olmoe", 1e4, num_experts=4, num_experts_per_tok=2),
    "granitemoe": theta("granitemoe", 1e4, num_local_experts=4, num_experts_per_tok=2),
    "deepseek_v2": theta("deepseek_v2", 1e4, **GROUPED, **LATENT),
    "deepseek_v3": theta("deepseek_v3", 1e4, **GROUPED, **LATENT),
    "glm4_moe": partial("glm4_moe", 1e4, 0.5, head_dim=16, **GROUPED),
    "dots1": theta("dots1", 1e4, head_dim=16, n_shared_experts=1, **GROUPED),
    "ernie4_5_moe": theta("ernie4_5_moe", 1e4, moe_num_experts=4, moe_k=2, moe_intermediate_size=48, head_dim=16),
    "hunyuan_v1_moe": theta("hunyuan_v1_moe", 1e4, num_experts=4, moe_topk=2, head_dim=16),
    "gpt_oss": theta("gpt_oss", 1e4, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "jamba": theta(
        "jamba",
        1e4,
        num_experts=4,
        num_experts_per_tok=2,
        attn_layer_period=1,
        attn_layer_offset=0,
        expert_layer_period=1,
        expert_layer_offset=0,
        use_mamba_kernels=False,
    ),
}
"""Mixtures of experts, which only torch trains, by a name of the test's."""
IN_MAKE_TEST, IN_TEST_ALL = ("llama3", "phi3-longrope", "gemma3"), ("mistral", "qwen2", "qwen3", "smollm3", "gemma2")
TIERS = dict.fromkeys(FAMILIES, "soak") | dict.fromkeys(IN_TEST_ALL, "all") | dict.fromkeys(IN_MAKE_TEST, "test")
EACH = [pytest.param(name, marks=pytest.mark.tier(tier)) for name, tier in TIERS.items()]
"""Arguments of a test of each family. `make test` has scaled RoPE, long factors, and windows with their own RoPE."""


def save(name: str, folder: Path, **changes: Any) -> Path:
    """A random model of a family in float32 in `folder`, as `save_pretrained` writes it; `changes`: of its sizes."""
    import torch
    import transformers

    torch.manual_seed(11)
    loader: Any = transformers.AutoModelForCausalLM
    model = loader.from_config({**FAMILIES, **MIXTURES}[name].config(**changes), dtype=torch.float32)
    for constant, values in model.named_buffers():
        if constant.endswith("layer_scalar"):
            values.fill_(0.7)
    model.save_pretrained(folder)
    return folder


def learnable_samples() -> list[dict[str, list[int]]]:
    """Return samples of different lengths, whose tokens a small model learns soon."""
    chance = random.Random(2)
    found = []
    for _ in range(60):
        length, start = chance.choice([3, 5, 9, 20]), chance.randrange(1, SMALL["vocab_size"] // 2)
        tokens = [start + at % 5 for at in range(length)]
        found.append({"tokens": tokens, "mask": [int(at > length // 3) for at in range(length)]})
    return found
