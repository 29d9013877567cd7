"""Encoder-decoder models: transformers' losses, whatever the micro-batches and shares; answers, scores and refusals.

`make test` has 15 steps of one model beside transformers' trainer, `make soak` 50 of each.
"""

import contextlib
import functools
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import write_rows
from tests.trainer.support.curves import G, group_losses, losses, worst
from tests.trainer.support.library_trainers import (
    FEW_STEPS,
    FULL,
    LORA,
    RATE,
    STEPS,
    arguments,
    library_model,
    order,
    ours,
    reports,
    trained,
)
from tests.trainer.support.passes import loss_and_gradient
from tests.trainer.support.seq2seq_model import KINDS, make_seq2seq_model, sentences

from trainctl.protocol.batch.memory_estimate import estimate_memory
from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends.passes import Decoding
from trainctl.trainer.data.preview import preview
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.step.sampler import Answerer
from trainctl.trainer.worker import Scorer

ROWS = sentences(90)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model of each kind, made once."""
    folder = tmp_path_factory.mktemp("seq2seq")
    return functools.cache(lambda name: make_seq2seq_model(folder / name, name))


def tokenizer_of(model):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(model)


@pytest.fixture
def run_settings(tmp_path, models):
    """Return the settings of a run file: `run_settings("bart", adapter=LORA)`."""

    def make(name="t5", **changes):
        rows = write_rows(tmp_path / "rows.jsonl", ROWS)
        settings: dict[str, Any] = {
            "model__path": str(models(name)), "data": {"path": str(rows), "kind": "rows", "sequence_length": 96},
            "optimizer": {"learning_rate": RATE, "weight_decay": 0.0, "beta2": 0.999},
            "objective": {"kind": "seq2seq"},
        }  # fmt: skip
        return settings | changes

    return make


@pytest.fixture
def start(new_rig, run_settings):
    """A rank: `start("bart", adapter=LORA)`."""
    return lambda name="t5", **changes: new_rig("torch", **run_settings(name, **changes))


def theirs(rig, folder, steps):
    """None of ours: transformers tokenizes, collates and trains, a whole batch at a time: of several
    micro-batches its trainer adds up the means, for these models."""
    import transformers

    made, model = tokenizer_of(rig.config.model.path), library_model(rig, task_type="SEQ_2_SEQ_LM")
    rows = [ROWS[index] for index in order(rig, steps)]
    tokens = [made(row["prompt"], text_target=row["completion"]).data for row in rows]
    args = arguments(transformers.Seq2SeqTrainingArguments, folder, steps, G, weight_decay=0.0)
    collator = transformers.DataCollatorForSeq2Seq(made, model, label_pad_token_id=-100)
    return trained(transformers.Seq2SeqTrainer, tokens, model=model, args=args, data_collator=collator).losses  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "adapter", "steps"),
    [("t5", LORA, FEW_STEPS)]
    + [pytest.param(name, one, STEPS, marks=pytest.mark.tier("soak")) for name in KINDS for one in (LORA, FULL)],
)
def test_losses_are_those_of_transformers_trainer(start, tmp_path, name, adapter, steps):
    rig = start(name, adapter=adapter)
    expected = theirs(rig, tmp_path / "trainer", steps)
    assert expected[0] / expected[-1] - 1 > 1000 * 1e-5, "it has to learn for this to mean anything"
    assert worst(ours(rig, steps), expected) < 1e-5


def test_three_uneven_ranks_draw_the_curve_of_one(new_ranks, start, run_settings):
    ranks = new_ranks("gloo", ("torch", "torch", "torch"), **run_settings("bart"))
    curve = group_losses(ranks, [((6, 4, 2), (4, 3, 2))] * 4 + [((1, 9, 2), (1, 4, 2))] * 4)
    whole = losses(start("bart"), False, 8)
    assert worst(curve, whole) < 1e-5
    assert 1 - whole[-1] / whole[0] > 1000 * 1e-5


def test_padding_that_the_encoder_sees_would_not_pass(start):
    """Without a mask a sample's loss depends on the others in its micro-batch."""
    rig = start()
    whole = rig.dataset.batch(np.arange(6))
    alone = [rig.dataset.batch(np.array([index])) for index in range(6)]

    def apart(seen):
        together = rig.backend.evaluate(seen(whole)).losses["tokens"]
        return abs(together / sum(rig.backend.evaluate(seen(one)).losses["tokens"] for one in alone) - 1)

    def without_mask(batch):
        full = np.full(len(batch), batch.prompts.inputs.shape[1])
        return replace(batch, prompts=replace(batch.prompts, lengths=full))

    assert apart(lambda batch: batch) < 1e-6
    assert apart(without_mask) > 1e-4


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_layers_that_are_computed_again_give_the_same_gradient(start, name):
    rigs = (start(name, model__gradient_checkpointing=mode) for mode in ("none", "all"))
    plain, again = (loss_and_gradient(rig.backend, rig.dataset.batch(np.arange(5)))[1] for rig in rigs)
    assert all(np.array_equal(plain[part], again[part]) for part in plain)


def test_answers_are_those_of_generate_and_scores_those_of_its_loss(start):
    import torch

    rig = start("bart")
    reports(rig, 20, (12,))
    path = Path(rig.config.model.path)
    made = tokenizer_of(path)
    model = rig.backend._model.eval()
    tokenizer = row_tokenizer(path, "model", "run.toml")
    answerer = Answerer(rig.backend, tokenizer, 128, plain=False)
    prompt, completion = ROWS[3]["prompt"], ROWS[3]["completion"]
    answer = answerer.answer(prompt, Decoding(16, 0.0, 1.0, 0), lambda: None)
    given = made(prompt, text_target=completion, return_tensors="pt")
    with torch.no_grad():
        expected = model.generate(given["input_ids"], max_new_tokens=16, do_sample=False, num_beams=1)[0]
        loss = model(**given).loss.item()
    assert answer.text == made.decode(expected, skip_special_tokens=True) != ""
    (found,) = Scorer(rig.backend, tokenizer, 128, 512).process(
        0, [f'{{"prompt": "{prompt}", "completion": "{completion}"}}']
    )
    assert found["tokens"] == given["labels"].numel()
    assert found["mean"] == pytest.approx(-loss, rel=1e-5)
    (refused,) = Scorer(rig.backend, tokenizer, 8, 512).process(0, [f'{{"prompt": "{prompt}", "completion": "a"}}'])
    assert refused["error"].endswith("tokens long; the model allows 8")


def test_a_prompt_may_be_as_long_as_the_encoder(start, models, tmp_path):
    prompt = ROWS[3]["prompt"]
    rows = write_rows(tmp_path / "one.jsonl", [ROWS[3] | {"completion": "a"}] * 2)
    tokens = tokenizer_of(models("t5"))(prompt)["input_ids"]
    limits = {"overlong": "refuse", "kind": "rows", "path": str(rows), "held_out": 0.0}
    rig = start(data=limits | {"sequence_length": len(tokens)})
    found = preview(rig.config, 0, "run.toml")
    assert found.lengths["p100"] == len(tokens) and found.padding == 0.0
    assert found.tokens == rig.dataset.batch(np.arange(2)).tokens
    with pytest.raises(InvalidInputError, match=rf"line 1 is {len(tokens)} tokens long; .* allows {len(tokens) - 1},"):
        start(data=limits | {"sequence_length": len(tokens) - 1})
    tokenizer = row_tokenizer(Path(rig.config.model.path), "model", "run.toml")
    for most, is_short in ((len(tokens), False), (len(tokens) - 1, True)):
        (scored,) = Scorer(rig.backend, tokenizer, most, 512).process(0, [rows.read_text().splitlines()[0]])
        assert scored.get("error", "") == (f"is {len(tokens)} tokens long; the model allows {most}" * is_short)
        answerer = Answerer(rig.backend, tokenizer, most, plain=False)
        with pytest.raises(InvalidInputError) if is_short else contextlib.nullcontext():
            assert answerer.answer(prompt, Decoding(2, 0.0, 1.0, 0), lambda: None).tokens


def test_a_batch_has_what_transformers_shifts(start):
    rig = start("bart", data__held_out=0.1)
    batch, made = rig.dataset.batch(np.array([2])), tokenizer_of(rig.config.model.path)
    row = ROWS[int(rig.dataset._training[2])]
    labels = made(text_target=row["completion"])["input_ids"]
    assert batch.prompts.inputs[0].tolist() == made(row["prompt"])["input_ids"]
    assert batch.targets[0].tolist() == labels
    assert batch.inputs[0].tolist() == [rig.backend._model.config.decoder_start_token_id, *labels[:-1]]
    assert batch.weight == len(labels) and batch.tokens == len(labels) + len(batch.prompts.inputs[0])
    assert rig.dataset.held_out == 9
    probe = rig.dataset.probe_batch()
    assert probe.prompts is not None and probe.weight == 256 and probe.prompts.inputs.shape[1] <= 64
    part = probe.rows(np.array([1, 0]))
    assert np.allclose(
        rig.backend.token_log_probabilities(part), rig.backend.token_log_probabilities(probe)[[1, 0]], atol=1e-5
    )


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_prompt_is_cut_as_transformers_cuts_it(start, name):
    rig = start(name, data__sequence_length=20)
    batch, made = rig.dataset.batch(np.arange(80)), tokenizer_of(rig.config.model.path)
    rows = [ROWS[int(index)]["prompt"] for index in rig.dataset._training[:80]]
    cut = made(rows, truncation=True, max_length=20, padding=True, padding_side="right", return_tensors="np")
    assert {19, 20} <= {*batch.prompts.lengths.tolist()} and rig.dataset.truncated > 0
    assert batch.prompts.lengths.tolist() == cut["attention_mask"].sum(axis=1).tolist()
    assert np.array_equal(batch.prompts.inputs, cut["input_ids"] * cut["attention_mask"])
    number = int(np.argmax(batch.prompts.lengths))
    shown = rig.dataset.sample(int(rig.dataset.training[number]))[0][0]
    assert shown.tolist() == batch.prompts.inputs[number].tolist()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"nodes__here": {"backend": "mlx"}}, r'nodes\.here\.backend: "seq2seq" needs torch'),
        ({"data__packing": "best-fit"}, r'data\.packing: "seq2seq" does not support packing'),
        ({"data__kind": "samples"}, r'data\.kind: "seq2seq" needs rows with a prompt and a completion'),
        ({"data__tokenizer": "bytes"}, r'data\.tokenizer: "seq2seq" needs the tokenizer of its model'),
        ({"data__growing": True}, r'data\.growing: "seq2seq" needs whole files'),
        ({"adapter": LORA | {"dropout": 0.1}}, r'adapter\.dropout: "seq2seq" does not support adapter dropout'),
        ({"model__base": "nf4"}, r'model\.base: "seq2seq" does not support quantized bases'),
    ],
)
def test_what_it_does_not_offer_is_refused(run_file, run_settings, changes, problem):
    with pytest.raises(InvalidInputError, match=problem):
        run_file(**run_settings(), **changes)


def test_a_model_of_the_other_kind_or_a_row_without_a_completion_is_refused(
    run_file, run_settings, start, chat_model, tmp_path
):
    shutil.copytree(run_settings()["model__path"], tmp_path / "wordless", ignore=lambda *_: ["tokenizer.json"])
    text = write_rows(tmp_path / "text.jsonl", [{"text": "a"}])
    for changes, problem in (
        (run_settings(objective={"kind": "sft"}), r"objective\.kind: t5 is an encoder-decoder model: set "),
        (
            run_settings(model__path=str(chat_model)),
            r"needs an encoder-decoder .*; llama is a decoder: set ",
        ),
        (run_settings("bart") | {"data__sequence_length": 129}, r"129 is above the 128 positions that bart has"),
        (run_settings() | {"data__path": str(text)}, 'line 1: needs "prompt" and "completion"; it has "text"'),
        (
            run_settings(model__path=str(tmp_path / "wordless")),
            r"needs .*tokenizer\.json; save the model's tokenizer",
        ),
    ):
        with pytest.raises(InvalidInputError, match=problem):
            runfile.check_paths(run_file(**changes), "run.toml")
    talk = {"prompt": [{"role": "user", "content": "a"}], "completion": [{"role": "assistant", "content": "b"}]}
    with pytest.raises(InvalidInputError, match=r'line 1: needs "prompt" and "completion" of text for an encoder-dec'):
        start(data__path=str(write_rows(tmp_path / "talk.jsonl", [talk])))


def test_adapters_of_layers_with_other_names_in_the_files_are_refused(start, models, tmp_path):
    """As those of models that were saved without their head."""
    import transformers

    transformers.BartModel.from_pretrained(models("bart")).save_pretrained(tmp_path / "headless")
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(models("bart") / name, tmp_path / "headless" / name)
    with pytest.raises(InvalidInputError, match=r"another name in the model's files: save the model with transformers"):
        start(model__path=str(tmp_path / "headless"), adapter=LORA)


def test_adapters_and_memory_of_both_stacks(run_file, run_settings, start):
    config = run_file(**run_settings("t5", adapter=LORA))
    facts = read_facts(Path(config.model.path), "run.toml")
    assert facts is not None and (facts.layers, facts.crossing, facts.heads, facts.vocabulary) == (4, 2, 2, 512)
    found = estimate_memory(config, facts, config.nodes["here"], "torch", "run.toml")
    model = library_model(start("t5"))
    assert found.parameters == model.num_parameters()
    linear = [name for name, part in model.named_modules() if type(part).__name__ == "Linear" and name != "lm_head"]
    assert found.trained == 4 * sum(sum(model.get_submodule(name).weight.shape) for name in linear)
    last = run_file(**run_settings("t5", adapter=LORA | {"layers": 1, "targets": ["q"]}))
    assert estimate_memory(last, facts, last.nodes["here"], "torch", "run.toml").trained == 4 * 3 * (32 + 32)
