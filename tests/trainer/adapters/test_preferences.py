"""Preference tuning draws TRL's curves: same weights, same pairs, in float32, for each loss of DPO, ORPO and SimPO.

`make test` has 15 steps of one loss beside TRL, `make test-all` also of ORPO and SimPO, `make soak` 50 of each. ORPO's
two terms keep a divisor each however the batch is cut.
"""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import tokenizer
from tests.trainer.support.curves import G, worst
from tests.trainer.support.library_trainers import (
    FEW_STEPS,
    FULL,
    LORA,
    RATE,
    STEPS,
    arguments,
    library_model,
    losses,
    order,
    reports,
    trained,
)
from tests.trainer.support.preferences import NAMES, PAIRS, run_settings

from trainctl.protocol.config.objectives import ObjectiveTable
from trainctl.trainer.objectives.losses import Simpo
from trainctl.trainer.objectives.objective import Sums

OBJECTIVES: dict[str, dict[str, Any]] = {
    "sigmoid": {"kind": "dpo"},
    "ipo": {"kind": "dpo", "loss": "ipo"},
    "robust": {"kind": "dpo", "loss": "robust", "label_smoothing": 0.1},
    "hinge": {"kind": "dpo", "loss": "hinge"},
    "orpo": {"kind": "orpo", "beta": 0.5},
    "simpo": {"kind": "simpo", "beta": 2.0, "gamma": 1.0},
}
ORPO_NAMES = ("nll_loss", "log_odds_ratio", "log_odds_chosen")
ALL, SOAK = pytest.mark.tier("all"), pytest.mark.tier("soak")


def names_of(loss):
    return (*NAMES, *ORPO_NAMES) if loss == "orpo" else NAMES


def trained_by_trl(rig, loss, folder, steps):
    import trl
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model, words = library_model(rig, task_type="CAUSAL_LM"), tokenizer()
    rows = [PAIRS[index] for index in order(rig, steps)]
    common: dict[str, Any] = {"max_length": 257, "gradient_checkpointing": False}
    if loss == "orpo":
        words.bos_token = None  # else theirs puts it before the prompts, which the tokenizer itself doesn't
        args = arguments(ORPOConfig, folder, steps, G, beta=0.5, **common)
        return trained(ORPOTrainer, rows, model=model, processing_class=words, args=args)
    if loss == "simpo":
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        words.bos_token = None
        own = {"loss_type": "simpo", "cpo_alpha": 0.0, "simpo_gamma": 1.0, "beta": 2.0}
        args = arguments(CPOConfig, folder, steps, G, **own, **common)
        return trained(CPOTrainer, rows, model=model, processing_class=words, args=args)
    smoothing = 0.1 if loss == "robust" else 0.0
    args = arguments(trl.DPOConfig, folder, steps, loss_type=[loss], beta=0.1, label_smoothing=smoothing, **common)
    return trained(trl.DPOTrainer, rows, model=model, processing_class=words, args=args)


@pytest.mark.parametrize(
    ("loss", "adapter", "steps"),
    [
        ("sigmoid", LORA, FEW_STEPS),
        pytest.param("orpo", LORA, FEW_STEPS, marks=ALL),
        pytest.param("simpo", LORA, FEW_STEPS, marks=ALL),
        *(pytest.param(loss, LORA, STEPS, marks=SOAK) for loss in OBJECTIVES),
        pytest.param("orpo", FULL, STEPS, marks=SOAK),
    ],
)
def test_losses_and_metrics_are_trl_s(tune, tmp_path, loss, adapter, steps):
    rig = tune("torch", OBJECTIVES[loss], adapter=adapter)
    theirs = trained_by_trl(rig, loss, tmp_path / "trl", steps)
    logged, found = [entry for entry in theirs.state.log_history if "rewards/margins" in entry], reports(rig, steps)
    assert len(logged) == len(found) == steps
    assert worst(losses(found), [entry["loss"] for entry in logged]) < 1e-5
    for name in names_of(loss):
        mine, other = np.array([report.values[name] for report in found]), np.array([entry[name] for entry in logged])
        assert np.abs(mine - other).max() <= 1e-5 * max(1.0, np.abs(other).max()), name


@pytest.mark.parametrize(
    ("loss", "adapter", "sizes", "steps"),
    [
        ("sigmoid", LORA, (1, 7), 3),
        ("orpo", FULL, (1, 5, 7), 3),
        *(pytest.param(loss, LORA, (5,), 3, marks=ALL) for loss in [*OBJECTIVES][1:]),
        *(pytest.param(loss, LORA, range(1, G), 4, marks=SOAK) for loss in OBJECTIVES),
    ],
)
def test_no_cut_of_the_batch_changes_the_loss(tune, loss, adapter, sizes, steps):
    whole = losses(reports(tune("torch", OBJECTIVES[loss], adapter=adapter), steps, (G,)))
    for size in sizes:
        cut = losses(reports(tune("torch", OBJECTIVES[loss], adapter=adapter), steps, (size,)))
        assert worst(cut, whole) < 1e-6


@pytest.mark.parametrize(
    ("loss", "steps"),
    [("sigmoid", 2), ("orpo", 2), ("simpo", 2), *(pytest.param(loss, 6, marks=ALL) for loss in OBJECTIVES)],
)
def test_mlx_follows_torch(tune, loss, steps):
    one, other = (reports(tune(backend, OBJECTIVES[loss]), steps) for backend in ("torch", "mlx"))
    assert worst(losses(other), losses(one)) < 5e-6
    for name in names_of(loss):
        assert np.allclose([r.values[name] for r in other], [r.values[name] for r in one], rtol=1e-4, atol=1e-5), name


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_simpo_is_its_paper_s_formula(tune, backend):
    rig = tune(backend, OBJECTIVES["simpo"])
    batch = rig.dataset.batch(np.arange(3))
    rewards = 2.0 * rig.backend.token_log_probabilities(batch).sum(-1) / batch.counted.sum(-1)
    losses = np.log1p(np.exp(-(rewards[0::2] - rewards[1::2] - 1.0)))
    evaluated = rig.backend.evaluate(batch)
    assert evaluated.losses["pairs"] == pytest.approx(losses.sum(), rel=1e-5)
    assert evaluated.metrics["rewards/margins"] == pytest.approx((rewards[0::2] - rewards[1::2]).sum(), rel=1e-3)


def test_simpo_of_answers_of_unlike_lengths_worked_out_by_hand():
    """-2 nats over 2 tokens and -8 over 4: 2 (-1) - 2 (-2) - 1 = 1, and log(1 + e^-1) = 0.31326."""
    import torch

    from trainctl.trainer.backends.torch_passes import TorchOutputs

    class Answers(TorchOutputs):
        counted = torch.tensor([[1.0, 1, 0, 0], [1, 1, 1, 1]])

        def losses(self, *, every=False, summed=False):
            return torch.tensor([[0.5, 1.5, 0, 0], [1, 3, 2, 2]])

    sums = Simpo(ObjectiveTable(kind="simpo", beta=2.0, gamma=1.0)).sums(Answers(None, None))
    assert float(sums.losses["pairs"]) == pytest.approx(0.3132617, rel=1e-6)
    assert [float(sums.metrics[name]) for name in NAMES] == [-2.0, -4.0, 1.0, 2.0, -1.0, -2.0]


def test_dropout_is_that_of_the_pair_s_place(tune):
    dropped, plain = LORA | {"dropout": 0.2}, OBJECTIVES["sigmoid"]
    whole = losses(reports(tune("torch", plain, adapter=dropped), 3, (G,)))
    assert worst(losses(reports(tune("torch", plain, adapter=dropped), 3, (5,))), whole) < 1e-6
    assert worst(losses(reports(tune("torch", plain), 3, (G,))), whole) > 1e-4


def test_uneven_shares_of_two_ranks_change_no_loss(tune, new_ranks, tmp_path, chat_model):
    alone = losses(reports(tune("torch", OBJECTIVES["orpo"]), 4, (G,)))
    ranks = new_ranks("ring", ("torch", "mlx"), **run_settings(tmp_path, chat_model, OBJECTIVES["orpo"]))
    assert not ranks.form()
    plans = (ranks.plan(step, (5, 7) if step % 2 else (9, 3), (3, 2), learning_rate=RATE) for step in range(1, 5))
    assert worst(losses([ranks.train(plan)[0] for plan in plans]), alone) < 1e-5


def test_orpo_counts_a_step_s_weights_without_assembling_it(tune):
    rig, assembled = tune("mlx", {"kind": "orpo"}), []
    make = rig.dataset.batch
    rig.dataset.batch = lambda indices: assembled.append(len(indices)) or make(indices)
    report = rig.train(1, 4)
    assert max(assembled) == 4 < G == report.weight
    whole = rig.rank.objective.weights(rig.rank.batch(np.arange(G)))
    assert rig.rank.objective.weights_of(rig.rank.sequence_lengths(np.arange(G))) == whole


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_terms_are_paired_with_their_weights_by_name(tune, backend):
    def gradient(turned):
        rig = tune(backend, {"kind": "orpo"})
        objective = rig.rank.objective
        make = objective.sums
        if turned:
            objective.sums = lambda outputs: turned_around(make(outputs))
        rig.backend.clear()
        scales = {"pairs": 0.5, "tokens": 0.25}
        rig.backend.loss_and_gradient(rig.rank.batch(np.arange(4)), scales, adding=nullcontext())
        return rig.backend.sums(), rig.backend.copy_out("accumulators")

    (plain, slopes), (other, same) = gradient(False), gradient(True)
    assert (plain.losses, plain.metrics) == (other.losses, other.metrics)
    assert all(np.array_equal(slopes[name], same[name]) for name in slopes)


def turned_around(sums):
    parts = ({name: named[name] for name in reversed(named)} for named in (sums.losses, sums.metrics))
    return Sums(*parts, sums.rewards)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_certain_answer_has_odds_and_no_gradient(tune, backend):
    rig = tune(backend, OBJECTIVES["orpo"])
    outputs, given = rig.backend.passes.outputs(rig.dataset.batch(np.arange(2))), [0.0, -1e-3, -30.0]
    if backend == "torch":
        import torch

        x = torch.tensor(given, requires_grad=True)
        odds = outputs.log_odds(x)
        slope = torch.autograd.grad(odds.sum(), x)[0]
        odds = odds.detach()
    else:
        import mlx.core as mx

        odds = outputs.log_odds(mx.array(given))
        slope = mx.grad(lambda x: outputs.log_odds(x).sum())(mx.array(given))
    values = [float(value) for value in odds]
    assert 15 < values[0] < 17
    assert np.allclose(values[1:], [np.log(np.exp(-1e-3) / -np.expm1(-1e-3)), -30.0], rtol=1e-5)
    assert float(slope[0]) == 0.0
