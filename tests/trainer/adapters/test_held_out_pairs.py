"""Evaluations of preferences: TRL's figures, the divergence from the reference, and sums that any cut adds up to."""

import numpy as np
import pytest
from tests.trainer.support.chat_model import tokenizer
from tests.trainer.support.curves import G
from tests.trainer.support.library_trainers import arguments, library_model
from tests.trainer.support.preferences import NAMES, PAIRS

from trainctl.node_agent.planning.results import evaluation
from trainctl.protocol import messages as m
from trainctl.trainer.loop import train
from trainctl.trainer.step import side_plans
from trainctl.trainer.step.sampler import PairTexts

DPO, ORPO = {"kind": "dpo"}, {"kind": "orpo"}


def evaluated(rig, micro, cuts=()):
    """All held-out pairs, by ranks that end before each of `cuts`."""
    count, found = rig.dataset.held_out, []
    for first, stop in zip((0, *cuts), (*cuts, count), strict=True):
        work = (m.RankWork(0, (m.Range(first, stop - first),), micro),)
        found.append(side_plans.evaluate(rig.rank, rig.plan(0, micro, kind="evaluate", cursor=0, work=work), 0.0))
    return evaluation(rig.config, found)


def trained(tune, backend, objective, **changes):
    rig = tune(backend, objective, **changes)
    for step in range(1, 5):
        train(rig.rank, rig.plan(step, G, learning_rate=2e-2), 0.0)
    return rig


def difference(one, other):
    assert one.values.keys() == other.values.keys()
    pairs = [(one.loss, other.loss), *((one.values[name], other.values[name]) for name in one.values)]
    return max(abs(mine - theirs) / max(1.0, abs(theirs)) for mine, theirs in pairs)


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_kl_and_entropy_are_those_of_the_whole_logits(tune, monkeypatch, backend):
    rig = trained(tune, backend, DPO)
    monkeypatch.setattr("trainctl.trainer.objectives.objective._VOCABULARY_FLOATS", 3000)  # several pieces
    found = evaluated(rig, 2)
    kl, entropy, right, tokens = 0.0, 0.0, 0.0, 0.0
    for index in range(rig.dataset.held_out):
        batch = rig.dataset.held_out_batch(np.array([index]))
        own, other = (log_softmax(logits) for logits in both_logits(rig, batch))
        counted, likely = batch.counted > 0, np.exp(own)
        kl += (likely * (own - other)).sum(-1)[counted].sum()
        entropy -= (likely * own).sum(-1)[counted].sum()
        right += (own.argmax(-1) == batch.targets)[counted].sum()
        tokens += batch.weight
    assert kl / tokens > 1e-4
    assert found.values["eval/kl"] == pytest.approx(kl / tokens, rel=2e-4)
    assert found.values["eval/entropy"] == pytest.approx(entropy / tokens, rel=1e-5)
    assert found.values["eval/mean_token_accuracy"] == pytest.approx(right / tokens)


def both_logits(rig, batch):
    """[B, L, V] of the model, and of it without its adapter."""
    model, made = rig.backend._model, []
    if rig.backend.name == "torch":
        import torch

        with torch.no_grad():
            inputs = torch.tensor(batch.inputs, dtype=torch.int64)
            made.append(model(input_ids=inputs).logits.double().numpy())
            with model.disable_adapter():
                made.append(model(input_ids=inputs).logits.double().numpy())
        return made[0], made[1]
    import mlx.core as mx

    from trainctl.trainer.adapters import mlx_lora

    own = np.array(model(mx.array(batch.inputs)), np.float64)
    with mlx_lora.disabled(model, rig.backend.recipe.adapter):
        return own, np.array(model(mx.array(batch.inputs)), np.float64)


def log_softmax(logits):
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@pytest.mark.tier("all")
@pytest.mark.parametrize("objective", [DPO, ORPO])
def test_ranks_and_micro_batches_change_nothing(tune, objective):
    rig = trained(tune, "torch", objective, data__held_out=0.2)
    whole = evaluated(rig, rig.dataset.held_out)
    assert rig.dataset.held_out > 10
    assert difference(evaluated(rig, 3, (1, 7)), whole) < 2e-6
    other = trained(tune, "mlx", objective, data__held_out=0.2)
    assert difference(evaluated(other, 4), whole) < 1e-4
    assert ("eval/kl" in whole.values) == (objective == DPO)


def test_pairs_are_reported_with_their_rewards_and_texts(tune):
    rig = trained(tune, "torch", DPO)
    work = (m.RankWork(0, (m.Range(0, rig.dataset.held_out),), 2),)
    report = side_plans.evaluate(rig.rank, rig.plan(0, 2, kind="evaluate", cursor=0, work=work), 0.0)
    assert [pair.index for pair in report.pairs] == [*range(rig.dataset.held_out)]
    assert sum(pair.margin for pair in report.pairs) == pytest.approx(report.sums["rewards/margins"], rel=1e-5)
    texts = PairTexts(rig.config, rig.dataset)
    for pair, index in zip(report.pairs, rig.dataset._held_out, strict=True):
        made, row = texts.described(pair), PAIRS[index]
        assert (made.index, made.chosen) == (pair.index, pair.chosen)
        assert row["prompt"].endswith(made.prompt) and made.prompt
        assert row["chosen"].startswith(made.chosen_text) and row["rejected"].startswith(made.rejected_text)


def test_it_says_what_trl_does(tune, tmp_path):
    import datasets
    import torch
    import trl

    rig = trained(tune, "torch", DPO)
    now = rig.backend.copy_out("weights")
    model = library_model(tune("torch", DPO), task_type="CAUSAL_LM")
    held_out = datasets.Dataset.from_list([PAIRS[index] for index in rig.dataset._held_out])
    options = {"per_device_eval_batch_size": 64, "max_length": 257, "beta": 0.1, "gradient_checkpointing": False}
    args = arguments(trl.DPOConfig, tmp_path / "trl", **options)
    theirs = trl.DPOTrainer(
        model=model, processing_class=tokenizer(), train_dataset=held_out, eval_dataset=held_out, args=args
    )
    for name, parameter in theirs.model.named_parameters():  # it has taken the model as it was as its reference
        if parameter.requires_grad:
            parameter.data.copy_(torch.from_numpy(now[name.replace(".default", "")]))
    logged, found = theirs.evaluate(), evaluated(rig, 3)
    assert found.loss == pytest.approx(logged["eval_loss"], rel=1e-5)
    for name in (*NAMES, "entropy", "mean_token_accuracy"):
        assert found.values[f"eval/{name}"] == pytest.approx(logged[f"eval_{name}"], rel=1e-4, abs=1e-6), name
