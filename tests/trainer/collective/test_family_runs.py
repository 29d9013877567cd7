"""Every tested family: a torch and an MLX rank train one model of it for five steps, as transformers alone would.

`make test` has one of the families, `make soak` all.
"""

from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.chat_model import write_rows
from tests.trainer.support.curves import group_losses, losses, plain_losses, worst
from tests.trainer.support.families import FAMILIES, learnable_samples

from trainctl.protocol.config.families import TESTED

STEPS = 5
DEALS = [((8, 4), (3, 4)), ((5, 7), (2, 7)), ((11, 1), (5, 1)), ((3, 9), (3, 2)), ((6, 6), (6, 1))]
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}


def alone(rig, model):
    """None of ours: transformers' model in a plain loop."""
    import torch
    import transformers

    loader: Any = transformers.AutoModelForCausalLM
    whole = loader.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    groups = [
        {"params": [p for p in whole.parameters() if (p.ndim >= 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return plain_losses(rig, whole, torch.optim.AdamW(groups, betas=(0.9, 0.95)), STEPS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "granite" else [pytest.mark.tier("soak")]) for name in FAMILIES]
)
def test_two_unlike_ranks_train_it_as_transformers_does(new_ranks, new_rig, family, name, tmp_path):
    rows = write_rows(tmp_path / "runs.jsonl", learnable_samples())
    data = {"path": str(rows), "kind": "samples", "sequence_length": 20, "tokenizer": "bytes"}
    changes: dict[str, Any] = {"model__path": str(family(name)), "data": data}
    allowed = TESTED[FAMILIES[name].kind].gradient
    plain = alone(new_rig("torch", **changes), Path(changes["model__path"]))
    assert 1 - plain[-1] / plain[0] > 10 * allowed, "it has to learn for this to mean anything"
    assert worst(group_losses(new_ranks("gloo", ("torch", "mlx"), **changes), DEALS), plain) < allowed
    changes |= {"adapter": LORA}
    adapted, idle = losses(new_rig("torch", **changes), False, STEPS), new_rig("torch", **changes)
    reports = [idle.train(step, 12, learning_rate=0.0) for step in range(1, STEPS + 1)]
    assert worst(adapted, [report.loss_sum / report.weight for report in reports]) > 10 * allowed
    assert worst(group_losses(new_ranks("gloo", ("torch", "mlx"), **changes), DEALS), adapted) < allowed
