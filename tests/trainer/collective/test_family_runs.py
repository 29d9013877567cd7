"""Every tested family: a torch and an MLX rank train one model of it for five steps, as transformers alone would.

`make test` has one of the families, `make soak` all.
"""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from tests.trainer.support.curves import losses, plain_losses, worst
from tests.trainer.support.families import FAMILIES, SMALL, save
from tests.trainer.support.ranks import Ranks

from trainctl.protocol import messages as m
from trainctl.protocol.config.families import TESTED

STEPS = 5
SHARES = ((8, 4), (5, 7), (11, 1), (3, 9), (6, 6))
MICROS = ((3, 4), (2, 7), (5, 1), (3, 2), (6, 1))
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
IN_MAKE_TEST = "granite"


@pytest.fixture
def run_settings(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """What a run file says of a random model of a family, and of samples of different lengths that it can learn."""
    chance = random.Random(2)
    lines = []
    for _ in range(60):
        length, start = chance.choice([3, 5, 9, 20]), chance.randrange(1, SMALL["vocab_size"] // 2)
        tokens = [start + at % 5 for at in range(length)]
        lines.append(json.dumps({"tokens": tokens, "mask": [int(at > length // 3) for at in range(length)]}))
    (tmp_path / "runs.jsonl").write_text("\n".join(lines), "utf-8")
    data = {"path": str(tmp_path / "runs.jsonl"), "kind": "samples", "sequence_length": 20, "tokenizer": "bytes"}
    return lambda name: {"model__path": str(save(name, tmp_path / "model")), "data": data}


def curve_of(ranks: Ranks) -> list[float]:
    """The losses of five steps, which both ranks report alike."""
    assert ranks.form() == []
    curve = []
    for step, (shares, micros) in enumerate(zip(SHARES, MICROS, strict=True), 1):
        reports = ranks.train(ranks.plan(step, shares, micros))
        assert all(isinstance(report, m.Report) for report in reports), reports
        (loss,) = {report.loss_sum / report.weight for report in reports}
        curve.append(loss)
    return curve


def alone(rig: Any, model: Path) -> list[float]:
    """None of ours: transformers' model in a plain loop."""
    import torch

    loader: Any = transformers.AutoModelForCausalLM
    whole = loader.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    groups = [
        {"params": [p for p in whole.parameters() if (p.ndim >= 2) == decays], "weight_decay": 0.1 * decays}
        for decays in (True, False)
    ]
    return plain_losses(rig, whole, torch.optim.AdamW(groups, betas=(0.9, 0.95)), STEPS)


@pytest.mark.parametrize(
    "name", [name if name == IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.tier("soak")) for name in FAMILIES]
)
def test_two_unlike_ranks_train_it_as_transformers_does(
    new_ranks: Callable[..., Ranks], new_rig: Callable[..., Any], run_settings: Callable[..., Any], name: str
) -> None:
    changes, allowed = run_settings(name), TESTED[FAMILIES[name].kind].gradient
    plain = alone(new_rig("torch", **changes), Path(changes["model__path"]))
    assert 1 - plain[-1] / plain[0] > 10 * allowed, "it has to learn for this to mean anything"
    assert worst(curve_of(new_ranks("gloo", ("torch", "mlx"), **changes)), plain) < allowed
    changes |= {"adapter": LORA}
    adapted, idle = losses(new_rig("torch", **changes), False, STEPS), new_rig("torch", **changes)
    reports = [idle.train(step, 12, learning_rate=0.0) for step in range(1, STEPS + 1)]
    assert worst(adapted, [report.loss_sum / report.weight for report in reports]) > 10 * allowed
    assert worst(curve_of(new_ranks("gloo", ("torch", "mlx"), **changes)), adapted) < allowed
