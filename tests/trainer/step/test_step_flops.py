"""Operations of a step, against torch's own count of real models' passes."""

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, LlamaConfig, PhiConfig

from trainctl.protocol.batch.flops import StepFlops, step_flops
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.run_tables import AdapterTable

SEQUENCES, LENGTH, LAYERS = 3, 16, 3
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False),
    "tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "narrow heads": LlamaConfig(**SIZES, head_dim=4),
    "phi": PhiConfig(**SIZES),
}


def model_of(config: Any) -> Any:
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def flops_of(model: Any, folder: Path, adapter: AdapterTable) -> StepFlops:
    model.save_pretrained(folder)
    found = step_flops(adapter, read_facts(folder, "model"), "run file")
    assert found is not None
    return found


def expected(found: StepFlops) -> float:
    """What torch counts: eager attention also multiplies what is masked, so twice as much."""
    return found._replace(per_token_pair=2 * found.per_token_pair).of(SEQUENCES * LENGTH, SEQUENCES)


def counted(model: Any) -> int:
    inputs = torch.randint(0, 96, (SEQUENCES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(inputs).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_trained_whole(name: str, tmp_path: Path) -> None:
    model = model_of(CONFIGS[name])
    found = flops_of(model, tmp_path, AdapterTable())
    # Rotary positions are an outer product of a few values.
    assert counted(model) == pytest.approx(expected(found), rel=0.001)


@pytest.mark.parametrize("layers", [1, 2, 0])
def test_adapters_on_the_last_layers_of_a_frozen_model(layers: int, tmp_path: Path) -> None:
    model = model_of(CONFIGS["llama"])
    adapter = AdapterTable(kind="lora", rank=4, layers=layers)
    found = flops_of(model, tmp_path, adapter)
    lora = peft.LoraConfig(
        r=4, target_modules=LINEAR, layers_to_transform=[*range(LAYERS)][-layers:], task_type="CAUSAL_LM"
    )  # fmt: skip
    # The input of the first layer with adapters needs no gradient: its q, k and v cost less than is counted.
    spared = 2 * SEQUENCES * LENGTH * (32 * 32 + 2 * 16 * 32)
    assert counted(peft.get_peft_model(model, lora)) == pytest.approx(expected(found) - spared, rel=0.01)


def test_longer_sequences_attend_to_more(tmp_path: Path) -> None:
    found = flops_of(model_of(CONFIGS["llama"]), tmp_path, AdapterTable())
    assert found.of(128, 2) - found.of(128, 4) == pytest.approx(found.per_token_pair * 128 * 32)
