"""Encoder-decoder models: transformers' losses, whatever the micro-batches and shares; answers, scores and refusals.

`make test` has 15 steps of one model beside transformers' trainer, `make soak` 50 of each.
"""

import contextlib
import functools
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from numpy.typing import NDArray
from tests.trainer.support.chat_model import make_chat_model, write_rows
from tests.trainer.support.curves import SIZES, worst
from tests.trainer.support.ranks import Ranks
from tests.trainer.support.seq2seq_model import KINDS, make_seq2seq_model, sentences

from trainctl.protocol.batch.memory_estimate import estimate_memory
from trainctl.protocol.config import run_file as runfile
from trainctl.protocol.config.model_facts import read_facts
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.backends import torch_model
from trainctl.trainer.backends.base import Decoding
from trainctl.trainer.data import batch as batches
from trainctl.trainer.data.permutation import samples_at
from trainctl.trainer.data.preview import preview
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.step.answering import Answerer
from trainctl.trainer.work.scoring import Scorer

STEPS, FEW_STEPS, G, RATE = 50, 15, 12, 2e-3
LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}
FULL = {"kind": "full"}
ROWS = sentences(90)
Start = Callable[..., Any]


@pytest.fixture
def run_settings(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """What a run file says: `run_settings("bart", adapter=LORA)`."""

    def make(name: str = "t5", **changes: Any) -> dict[str, Any]:
        model = tmp_path / name
        if not model.exists():
            make_seq2seq_model(model, name)
        rows = write_rows(tmp_path / "rows.jsonl", ROWS)
        settings: dict[str, Any] = {
            "model__path": str(model), "data": {"path": str(rows), "kind": "rows", "sequence_length": 96},
            "optimizer": {"learning_rate": RATE, "weight_decay": 0.0, "beta2": 0.999},
            "objective": {"kind": "seq2seq"},
        }  # fmt: skip
        return settings | changes

    return make


@pytest.fixture
def start(new_rig: Callable[..., Any], run_settings: Callable[..., dict[str, Any]]) -> Start:
    """A rank: `start("bart", adapter=LORA)`."""
    return lambda name="t5", **changes: new_rig("torch", **run_settings(name, **changes))


def ours(rig: Any, steps: int = STEPS, sizes: tuple[int, ...] = SIZES) -> list[float]:
    plans = (rig.plan(step, sizes[step % len(sizes)], learning_rate=RATE) for step in range(1, steps + 1))
    reports = [rig.executor.train(plan, time.perf_counter()) for plan in plans]
    return [report.loss_sum / report.weight for report in reports]


def order(rig: Any, steps: int = STEPS) -> NDArray[np.int64]:
    """The number of each row of the file, as the run reads them."""
    return rig.dataset._training[samples_at(np.arange(steps * G), rig.dataset.samples, rig.config.run.seed)]


def theirs(rig: Any, adapter: dict[str, Any], folder: Path, steps: int) -> list[float]:
    """None of ours: transformers tokenizes, collates and trains, a whole batch at a time: of several
    micro-batches its trainer adds up the means, for these models."""
    import datasets
    import peft
    import torch

    path = Path(rig.config.model.path)
    made: Any = transformers.AutoTokenizer.from_pretrained(path)
    model: Any = torch_model.read_model(path, "run.toml")
    if adapter["kind"] == "lora":
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="SEQ_2_SEQ_LM")
        model = peft.get_peft_model(model, config)
        named = {name.replace(".default", ""): p for name, p in model.named_parameters() if p.requires_grad}
        values = rig.backend.copy_of("weights")
        assert named.keys() == values.keys()
        for name, parameter in named.items():
            parameter.data.copy_(torch.from_numpy(values[name]))
    rows = [ROWS[index] for index in order(rig, steps)]
    tokens = [made(row["prompt"], text_target=row["completion"]).data for row in rows]

    class Ordered(transformers.Seq2SeqTrainer):
        def _get_train_sampler(self, *dataset: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **options: Any) -> Any:
            loss = super().training_step(*arguments, **options)
            found.append(loss.item())
            return loss

    found: list[float] = []
    arguments = transformers.Seq2SeqTrainingArguments(
        str(folder), report_to=[], use_cpu=True, max_steps=steps, per_device_train_batch_size=G,
        learning_rate=RATE, lr_scheduler_type="constant", weight_decay=0.0,
        adam_beta2=0.999, max_grad_norm=1.0, save_strategy="no", logging_strategy="no", disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    Ordered(
        model=model, args=arguments, train_dataset=datasets.Dataset.from_list(tokens),
        data_collator=transformers.DataCollatorForSeq2Seq(made, model, label_pad_token_id=-100),
    ).train()  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("name", "adapter", "steps"),
    [("t5", LORA, FEW_STEPS),
     *(pytest.param(name, adapter, STEPS, marks=pytest.mark.tier("soak"))
       for name in KINDS for adapter in (LORA, FULL))],
)  # fmt: skip
def test_losses_are_those_of_transformers_trainer(
    start: Start, tmp_path: Path, name: str, adapter: dict[str, Any], steps: int
) -> None:
    rig = start(name, adapter=adapter)
    expected = theirs(rig, adapter, tmp_path / "trainer", steps)
    assert expected[0] / expected[-1] - 1 > 1000 * 1e-5, "it has to learn for this to mean anything"
    assert worst(ours(rig, steps), expected) < 1e-5


def test_three_uneven_ranks_draw_the_curve_of_one(
    new_ranks: Callable[..., Ranks], start: Start, run_settings: Callable[..., dict[str, Any]]
) -> None:
    ranks = new_ranks("gloo", ("torch", "torch", "torch"), **run_settings("bart"))
    assert ranks.form() == []
    curve = []
    for step in range(1, 9):
        shares, micros = ((6, 4, 2), (4, 3, 2)) if step < 5 else ((1, 9, 2), (1, 4, 2))
        reports: Any = ranks.train(ranks.plan(step, shares, micros))
        (loss,) = {report.loss_sum / report.weight for report in reports}
        curve.append(loss)
    alone = start("bart")
    reports = [alone.train(step, G) for step in range(1, 9)]
    whole = [report.loss_sum / report.weight for report in reports]
    assert worst(curve, whole) < 1e-5
    assert 1 - whole[-1] / whole[0] > 1000 * 1e-5


def test_padding_that_the_encoder_sees_would_not_pass(start: Start) -> None:
    """Without a mask a sample's loss depends on the others in its micro-batch."""
    rig = start()
    whole = rig.dataset.batch(np.arange(6))
    alone = [rig.dataset.batch(np.array([index])) for index in range(6)]

    def apart(seen: Callable[[batches.Batch], batches.Batch]) -> float:
        together = rig.backend.evaluate(seen(whole)).losses["tokens"]
        return abs(together / sum(rig.backend.evaluate(seen(one)).losses["tokens"] for one in alone) - 1)

    def without_mask(batch: batches.Batch) -> batches.Batch:
        assert batch.prompts is not None
        full = np.full(len(batch), batch.prompts.inputs.shape[1])
        return replace(batch, prompts=batch.prompts._replace(lengths=full))

    assert apart(lambda batch: batch) < 1e-6
    assert apart(without_mask) > 1e-4


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_layers_that_are_computed_again_give_the_same_gradient(start: Start, name: str) -> None:
    def gradient(mode: str) -> dict[str, NDArray[np.float32]]:
        rig = start(name, model__gradient_checkpointing=mode)
        rig.backend.forward(rig.dataset.batch(np.arange(5)), 1.0)
        rig.backend.backward()
        rig.backend.accumulate()
        return dict(rig.backend.copy_of("accumulators"))

    plain, again = gradient("none"), gradient("all")
    assert all(np.array_equal(plain[part], again[part]) for part in plain)


def test_answers_are_those_of_generate_and_scores_those_of_its_loss(start: Start) -> None:
    import torch

    rig = start("bart")
    ours(rig, 20, (12,))
    path = Path(rig.config.model.path)
    made: Any = transformers.AutoTokenizer.from_pretrained(path)
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


def test_a_prompt_may_be_as_long_as_the_encoder(start: Start, tmp_path: Path) -> None:
    prompt = ROWS[3]["prompt"]
    rows = write_rows(tmp_path / "one.jsonl", [ROWS[3] | {"completion": "a"}] * 2)
    tokens = transformers.AutoTokenizer.from_pretrained(make_seq2seq_model(tmp_path / "t5"))(prompt)["input_ids"]
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


def test_a_batch_has_what_transformers_shifts(start: Start) -> None:
    rig = start("bart", data__held_out=0.1)
    batch, made = rig.dataset.batch(np.array([2])), transformers.AutoTokenizer.from_pretrained(rig.config.model.path)
    row = ROWS[int(rig.dataset._training[2])]
    labels = made(text_target=row["completion"])["input_ids"]
    assert batch.prompts is not None
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
def test_a_prompt_is_cut_as_transformers_cuts_it(start: Start, name: str) -> None:
    rig = start(name, data__sequence_length=20)
    batch, made = rig.dataset.batch(np.arange(80)), transformers.AutoTokenizer.from_pretrained(rig.config.model.path)
    rows = [ROWS[int(index)]["prompt"] for index in rig.dataset._training[:80]]
    cut = made(rows, truncation=True, max_length=20, padding=True, padding_side="right", return_tensors="np")
    assert batch.prompts is not None
    assert {19, 20} <= {*batch.prompts.lengths.tolist()} and rig.dataset.truncated > 0
    assert batch.prompts.lengths.tolist() == cut["attention_mask"].sum(axis=1).tolist()
    assert np.array_equal(batch.prompts.inputs, cut["input_ids"] * cut["attention_mask"])
    number = int(np.argmax(batch.prompts.lengths))
    shown = rig.dataset.sample(int(rig.dataset.training[number]))[0][0]
    assert shown.tolist() == batch.prompts.inputs[number].tolist()


def test_what_a_preview_shows(run_file: Callable[..., Any], run_settings: Callable[..., dict[str, Any]]) -> None:
    config = run_file(**run_settings("t5"))
    shown = preview(config, 1, "run.toml").shown[0]
    counted = "".join(text for text, is_learned in shown.tokens if is_learned)
    whole = "".join(text for text, _ in shown.tokens)
    assert counted.startswith(ROWS[0]["completion"]) and ROWS[0]["prompt"] in whole
    assert whole.count("<|im_end|>") == 2


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"nodes__here": {"backend": "mlx"}},
            r'nodes\.here\.backend: "seq2seq" needs torch, because mlx-lm has no enc',
        ),
        ({"data__packing": "best-fit"}, r'data\.packing: "seq2seq" does not support packing: set data\.packing'),
        ({"data__kind": "samples"}, r'data\.kind: "seq2seq" needs rows with a prompt and a completion: set "rows"'),
        ({"data__kind": "text"}, r"objective\.kind: 'seq2seq' needs data\.kind = \"rows\" or \"samples\""),
        ({"data__tokenizer": "bytes"}, r'data\.tokenizer: "seq2seq" needs the tokenizer of its model: set "model"'),
        ({"data__growing": True}, r'data\.growing: "seq2seq" needs whole files: set data\.growing = false'),
        ({"adapter": LORA | {"dropout": 0.1}}, r'adapter\.dropout: "seq2seq" does not support adapter dropout'),
        ({"model__base": "nf4"}, r'model\.base: "seq2seq" does not support quantized bases: set model\.base'),
    ],
)
def test_what_it_does_not_offer_is_refused(
    run_file: Callable[..., Any], run_settings: Callable[..., dict[str, Any]], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InvalidInputError, match=problem):
        run_file(**run_settings(), **changes)


def test_a_model_of_the_other_kind_or_a_row_without_a_completion_is_refused(
    run_file: Callable[..., Any], run_settings: Callable[..., dict[str, Any]], start: Start, tmp_path: Path
) -> None:
    check = functools.partial(runfile.check_paths, where="run.toml")
    with pytest.raises(InvalidInputError, match=r"objective\.kind: t5 is an encoder-decoder model: set .* has \'sft\'"):
        check(run_file(**run_settings("t5", objective={"kind": "sft"})))
    chat = make_chat_model(tmp_path / "chat")
    with pytest.raises(
        InvalidInputError, match=r'"seq2seq" needs an encoder-decoder .*; llama is a decoder: set "sft"'
    ):
        check(run_file(**run_settings(model__path=str(chat))))
    with pytest.raises(InvalidInputError, match=r"data\.sequence_length: 129 is above the 128 positions that bart has"):
        check(run_file(**run_settings("bart"), data__sequence_length=129))
    rows = write_rows(tmp_path / "text.jsonl", [{"text": "a"}])
    with pytest.raises(InvalidInputError, match=r'line 1: needs "prompt" and "completion"; it has "text"'):
        check(run_file(**run_settings(), data__path=str(rows)))
    talk = [{"role": "user", "content": "a"}]
    rows = write_rows(
        tmp_path / "talk.jsonl", [{"prompt": talk, "completion": [{"role": "assistant", "content": "b"}]}]
    )
    with pytest.raises(InvalidInputError, match=r'line 1: needs "prompt" and "completion" of text for an encoder-dec'):
        start(data__path=str(rows))


def test_a_model_without_a_tokenizer_is_refused_before_a_run(
    run_file: Callable[..., Any], run_settings: Callable[..., dict[str, Any]]
) -> None:
    config = run_file(**run_settings("t5"))
    (Path(config.model.path) / "tokenizer.json").unlink()
    with pytest.raises(InvalidInputError, match=r'"model" needs .*tokenizer\.json; save the model\'s tokenizer there'):
        runfile.check_paths(config, "run.toml")


def test_adapters_of_layers_with_other_names_in_the_files_are_refused(start: Start, tmp_path: Path) -> None:
    """As those of models that were saved without their head."""
    headless, model = tmp_path / "headless", make_seq2seq_model(tmp_path / "whole", "bart")
    transformers.BartModel.from_pretrained(model).save_pretrained(headless)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copyfile(model / name, headless / name)
    with pytest.raises(InvalidInputError, match=r"another name in the model's files: save the model with transformers"):
        start(model__path=str(headless), adapter=LORA)


def test_adapters_and_memory_of_both_stacks(
    run_file: Callable[..., Any], run_settings: Callable[..., dict[str, Any]]
) -> None:
    config = run_file(**run_settings("t5", adapter=LORA))
    facts = read_facts(Path(config.model.path), "run.toml")
    assert facts is not None and (facts.layers, facts.crossing, facts.heads, facts.vocabulary) == (4, 2, 2, 512)
    found = estimate_memory(config, facts, config.nodes["here"], "torch", "run.toml")
    model: Any = torch_model.read_model(Path(config.model.path), "run.toml")
    assert found.parameters == model.num_parameters()
    linear = [name for name, part in model.named_modules() if type(part).__name__ == "Linear" and name != "lm_head"]
    assert found.trained == 4 * sum(sum(model.get_submodule(name).weight.shape) for name in linear)
    last = run_file(**run_settings("t5", adapter=LORA | {"layers": 1, "targets": ["q"]}))
    assert estimate_memory(last, facts, last.nodes["here"], "torch", "run.toml").trained == 4 * 3 * (32 + 32)
