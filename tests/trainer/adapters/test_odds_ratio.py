"""Odds-ratio tuning draws TRL's curve, and its two terms keep a divisor each however the batch is cut.

`make test` has 15 steps beside TRL, `make soak` 50 of an adapter and of all weights.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import tokenizer
from tests.trainer.support.curves import G, worst
from tests.trainer.support.preferences import (
    FEW_STEPS,
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
from trainctl.trainer.objectives.objective import Sums
from trainctl.trainer.objectives.orpo import Orpo

ALL_NAMES = (*NAMES, "nll_loss", "log_odds_ratio", "log_odds_chosen")
FULL = {"kind": "full"}


@pytest.fixture
def start(new_rig: Callable[..., Any], tmp_path: Path) -> Start:
    """A rank that tunes preferences: `start("torch", adapter=FULL)`."""

    def make(backend: str, beta: float = 0.5, **changes: Any) -> Any:
        return new_rig(backend, **run_settings(tmp_path, {"kind": "orpo", "beta": beta}, **changes))

    return make


@pytest.mark.parametrize(("adapter", "steps"), [
    ("lora", FEW_STEPS),
    *(pytest.param(adapter, STEPS, marks=pytest.mark.tier("soak")) for adapter in ("lora", "full")),
])  # fmt: skip
def test_orpo_is_trl_s(start: Start, tmp_path: Path, adapter: str, steps: int) -> None:
    import datasets
    import torch
    from peft import LoraConfig, get_peft_model
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    rig = start("torch", **({} if adapter == "lora" else {"adapter": FULL}))
    model: Any = torch_model.read_model(Path(rig.config.model.path), "run.toml")
    if adapter == "lora":
        config = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, config)
    first = rig.backend.copy_of("weights")
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(first[name.replace(".default", "")]))

    class Ordered(ORPOTrainer):  # type: ignore[misc]
        def _get_train_sampler(self, *dataset: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

    words = tokenizer()
    words.bos_token = None  # else theirs puts it before the prompts, which the tokenizer itself doesn't
    theirs = Ordered(
        model=model, processing_class=words,
        train_dataset=datasets.Dataset.from_list(rows_in_order(rig, tmp_path, steps)),
        args=ORPOConfig(
            str(tmp_path / "trl"), report_to=[], use_cpu=True, max_steps=steps, per_device_train_batch_size=G,
            learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.1, adam_beta2=0.999, max_grad_norm=1.0,
            save_strategy="no", logging_steps=1, disable_tqdm=True, bf16=False, dataloader_pin_memory=False,
            max_length=257, beta=0.5, gradient_checkpointing=False,
        ),
    )  # fmt: skip
    theirs.train()
    assert_as_logged(reports(rig, steps), theirs, ALL_NAMES)


@pytest.mark.parametrize("adapter", [{"kind": "lora", "rank": 4, "alpha": 16.0}, FULL])
@pytest.mark.parametrize("steps", [3, pytest.param(6, marks=pytest.mark.tier("soak"))])
def test_no_cut_of_the_batch_changes_the_loss(start: Start, adapter: dict[str, Any], steps: int) -> None:
    whole = losses(reports(start("torch", adapter=adapter), steps, (G,)))
    for size in (1, 5, 7):
        assert worst(losses(reports(start("torch", adapter=adapter), steps, (size,))), whole) < 1e-6


def test_uneven_shares_of_two_ranks_change_no_loss(start: Start, new_ranks: Callable[..., Any], tmp_path: Path) -> None:
    alone = losses(reports(start("torch"), 6, (G,)))
    ranks = new_ranks("gloo", ("torch", "mlx"), **run_settings(tmp_path, {"kind": "orpo", "beta": 0.5}))
    assert not ranks.form()
    plans = (ranks.plan(step, (5, 7) if step % 2 else (9, 3), (3, 2), learning_rate=RATE) for step in range(1, 7))
    assert worst(losses([ranks.train(plan)[0] for plan in plans]), alone) < 1e-5


def test_one_weight_for_both_terms_would_be_seen(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = losses(reports(start("torch"), 6, (G,)))
    right = Orpo.sums

    def one_weight(self: Orpo, outputs: Any) -> Sums:
        found, pairs = right(self, outputs), len(outputs.counted) // 2
        per_token = found.losses["tokens"] / (outputs.every_loss()[0::2] > 0).sum()
        return Sums({"pairs": found.losses["pairs"] + pairs * per_token, "tokens": 0.0 * per_token}, found.metrics)

    monkeypatch.setattr(Orpo, "sums", one_weight)
    assert worst(losses(reports(start("torch"), 6, (G,))), whole) < 1e-6
    assert worst(losses(reports(start("torch"), 6, (5,))), whole) > 1e-3


def test_mlx_follows_torch(start: Start) -> None:
    one, other = reports(start("torch"), 6), reports(start("mlx"), 6)
    assert worst(losses(other), losses(one)) < 5e-6
    for name in ALL_NAMES:
        assert np.allclose([r.values[name] for r in other], [r.values[name] for r in one], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_certain_answer_has_odds_and_no_gradient(start: Start, backend: str) -> None:
    rig = start(backend)
    outputs = rig.backend._outputs(rig.dataset.batch(np.arange(2)))
    if backend == "torch":
        import torch

        x = torch.tensor([0.0, -1e-3, -30.0], requires_grad=True)
        odds = outputs.log_odds(x)
        slope = torch.autograd.grad(odds.sum(), x)[0]
        odds = odds.detach()
    else:
        import mlx.core as mx

        at = mx.array([0.0, -1e-3, -30.0])
        odds, slope = outputs.log_odds(at), mx.grad(lambda x: outputs.log_odds(x).sum())(at)
    values = [float(value) for value in odds]
    assert 15 < values[0] < 17
    assert np.allclose(values[1:], [np.log(np.exp(-1e-3) / -np.expm1(-1e-3)), -30.0], rtol=1e-5)
    assert float(slope[0]) == 0.0
