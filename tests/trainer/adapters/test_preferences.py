"""Preference tuning draws TRL's curves: same weights, same pairs, in float32, for each loss.

`make test` has 15 steps of one loss beside TRL, `make soak` 50 of each.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import tokenizer
from tests.trainer.support.curves import G, worst
from tests.trainer.support.preferences import (
    FEW_STEPS,
    LORA,
    NAMES,
    RATE,
    STEPS,
    Start,
    assert_as_logged,
    losses,
    reports,
    rows_in_order,
    run_settings,
)

from trainctl.trainer.backends import torch_model

LOSSES = ("sigmoid", "ipo", "robust", "hinge")


@pytest.fixture
def start(new_rig: Callable[..., Any], tmp_path: Path) -> Start:
    """A rank that tunes preferences: `start("torch", loss="ipo")`."""

    def make(backend: str, loss: str = "sigmoid", **changes: Any) -> Any:
        objective = {"kind": "dpo", "loss": loss, "label_smoothing": 0.1 if loss == "robust" else 0.0}
        return new_rig(backend, **run_settings(tmp_path, objective, **changes))

    return make


@pytest.mark.parametrize(("loss", "steps"), [
    (LOSSES[0], FEW_STEPS), *(pytest.param(loss, STEPS, marks=pytest.mark.tier("soak")) for loss in LOSSES),
])  # fmt: skip
def test_dpo_is_trl_s(start: Start, tmp_path: Path, loss: str, steps: int) -> None:
    import datasets
    import torch
    import trl
    from peft import LoraConfig, get_peft_model

    rig = start("torch", loss)
    config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model: Any = get_peft_model(torch_model.read_model(Path(rig.config.model.path), "run.toml"), config)
    first = rig.backend.copy_of("weights")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(first[name.replace(".default", "")]))

    class Ordered(trl.DPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *dataset: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    theirs = Ordered(
        model=model, processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list(rows_in_order(rig, tmp_path, steps)),
        args=trl.DPOConfig(
            str(tmp_path / "trl"), report_to=[], use_cpu=True, max_steps=steps, per_device_train_batch_size=4,
            gradient_accumulation_steps=G // 4, learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.1,
            adam_beta2=0.999, max_grad_norm=1.0, save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=False,
            dataloader_pin_memory=False, max_length=257, loss_type=[loss], beta=0.1,
            label_smoothing=0.1 if loss == "robust" else 0.0, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    theirs.train()
    assert_as_logged(reports(rig, steps), theirs, NAMES)


@pytest.mark.parametrize(("loss", "sizes", "steps"), [
    ("sigmoid", (1, 7), 3), *((loss, (5,), 3) for loss in LOSSES[1:]),
    *(pytest.param(loss, range(1, G), 4, marks=pytest.mark.tier("soak")) for loss in LOSSES),
])  # fmt: skip
def test_no_cut_of_the_batch_changes_the_loss(start: Start, loss: str, sizes: Sequence[int], steps: int) -> None:
    whole = losses(reports(start("torch", loss), steps, (G,)))
    for size in sizes:
        assert worst(losses(reports(start("torch", loss), steps, (size,))), whole) < 1e-6


def test_dividing_by_the_pairs_of_a_micro_batch_would_be_seen(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    from trainctl.trainer.objectives.dpo import Dpo
    from trainctl.trainer.objectives.objective import Sums

    whole = losses(reports(start("torch"), 3, (5,)))
    right = Dpo.sums

    def mean(self: Dpo, outputs: Any) -> Sums:
        found = right(self, outputs)
        pairs = len(outputs.counted) // 2
        return Sums({"pairs": found.losses["pairs"] * (G / 3 / pairs)}, found.metrics)

    monkeypatch.setattr(Dpo, "sums", mean)
    assert worst(losses(reports(start("torch"), 3, (5,))), whole) > 1e-3


@pytest.mark.parametrize(("loss", "steps"), [
    (LOSSES[0], 6), *((loss, 2) for loss in LOSSES[1:]),
    *(pytest.param(loss, 6, marks=pytest.mark.tier("soak")) for loss in LOSSES[1:]),
])  # fmt: skip
def test_mlx_follows_torch(start: Start, loss: str, steps: int) -> None:
    one, other = reports(start("torch", loss), steps), reports(start("mlx", loss), steps)
    assert worst(losses(other), losses(one)) < 5e-6
    for name in NAMES:
        assert np.allclose([r.values[name] for r in other], [r.values[name] for r in one], rtol=1e-4, atol=1e-5), name


def test_dropout_is_that_of_the_pair_s_place(start: Start) -> None:
    dropped = LORA | {"dropout": 0.2}
    whole = losses(reports(start("torch", adapter=dropped), 3, (G,)))
    assert worst(losses(reports(start("torch", adapter=dropped), 3, (5,))), whole) < 1e-6
    assert worst(losses(reports(start("torch"), 3, (G,))), whole) > 1e-4
