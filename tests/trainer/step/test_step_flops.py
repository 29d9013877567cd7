"""Operations of a step, against torch's own count of real models' passes."""

from typing import Any

import pytest

from trainctl.protocol.batch.flops import step_flops
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.config.run_tables import AdapterTable

SEQUENCES, LENGTH, LAYERS = 3, 16, 3
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2, "tie_word_embeddings": False},
    "tied": {"tie_word_embeddings": True},
    "narrow heads": {"head_dim": 4},
    "phi": {},
}


def model_of(name):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model("phi" if name == "phi" else "llama", **SIZES, **CONFIGS[name])
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def flops_of(model, folder, adapter):
    model.save_pretrained(folder)
    found = step_flops(adapter, read_facts(folder, "model"), "run file")
    assert found is not None
    return found


def expected(found):
    """What torch counts: eager attention also multiplies what is masked, so twice as much."""
    return found._replace(per_token_pair=2 * found.per_token_pair).of(SEQUENCES * LENGTH, SEQUENCES)


def counted(model):
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    inputs = torch.randint(0, 96, (SEQUENCES, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(inputs).logits.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_that_is_trained_whole(name, tmp_path):
    model = model_of(name)
    found = flops_of(model, tmp_path, AdapterTable())
    # Rotary positions are an outer product of a few values.
    assert counted(model) == pytest.approx(expected(found), rel=0.001)


@pytest.mark.parametrize("layers", [1, 2, 0])
def test_adapters_on_the_last_layers_of_a_frozen_model(layers, tmp_path):
    import peft

    model = model_of("llama")
    adapter = AdapterTable(kind="lora", rank=4, layers=layers)
    found = flops_of(model, tmp_path, adapter)
    lora = peft.LoraConfig(
        r=4, target_modules=LINEAR, layers_to_transform=[*range(LAYERS)][-layers:], task_type="CAUSAL_LM"
    )  # fmt: skip
    # The input of the first layer with adapters needs no gradient: its q, k and v cost less than is counted.
    spared = 2 * SEQUENCES * LENGTH * (32 * 32 + 2 * 16 * 32)
    assert counted(peft.get_peft_model(model, lora)) == pytest.approx(expected(found) - spared, rel=0.01)


def test_longer_sequences_attend_to_more(tmp_path):
    found = flops_of(model_of("llama"), tmp_path, AdapterTable())
    assert found.of(128, 2) - found.of(128, 4) == pytest.approx(found.per_token_pair * 128 * 32)
