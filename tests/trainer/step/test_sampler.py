"""Answers between steps: the libraries' own, the likeliest tokens or as asked for, and no trace in what follows."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.seq2seq_model import make_seq2seq_model

from trainctl.protocol import messages as m
from trainctl.protocol.config.run_tables import ChatMessage, NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import AnswerOptions
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.backends.load import load
from trainctl.trainer.common.errors import AbandonedError
from trainctl.trainer.common.model_files import end_tokens, longest_context
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.step.sampler import ANSWER_BYTES, Answerer, Sampler, cut

CHAT = (ChatMessage("system", "Answer."), ChatMessage("user", "What is a loop?"))
BACKENDS = pytest.mark.parametrize("backend", ["torch", "mlx"])


@pytest.fixture
def asked(tmp_path):
    """The answers of a rig's model to prompts."""

    def ask(rig, *prompts, max_tokens=12, temperature=0.0, seed=5):
        status = StatusWriter(tmp_path / "page", 1)
        how = m.Sampling(prompts, max_tokens, temperature, 0.9, seed)
        try:
            return Sampler(rig.config, rig.backend, rig.progress, status).answers(
                rig.plan(1, 1, kind="sample", sampling=how)
            )
        finally:
            status.close()

    return ask


def state_bytes(state):
    parts = (state.weights, *state.slots.values(), state.random)
    return [(name, np.asarray(array).tobytes()) for part in parts for name, array in part.items()]


@pytest.mark.parametrize("backend", ["torch", pytest.param("mlx", marks=pytest.mark.tier("all"))])
def test_sampling_changes_no_bit_of_the_state_nor_of_the_steps_after_it(backend, new_rig, asked):
    rig, other = new_rig(backend), new_rig(backend)
    for step in (1, 2):
        rig.train(step, 4), other.train(step, 4)
    before, sums = state_bytes(rig.backend.export_state()), rig.backend.copy_out("accumulators")
    drawn = [asked(rig, "def x", temperature=1.5, seed=seed)[0].text for seed in (1, 2, 1)]
    assert drawn[0] == drawn[2] != drawn[1]
    assert state_bytes(rig.backend.export_state()) == before
    assert all(np.array_equal(sums[name], array) for name, array in rig.backend.copy_out("accumulators").items())
    assert [rig.train(step, 4).loss_sum for step in (3, 4)] == [other.train(step, 4).loss_sum for step in (3, 4)]


@BACKENDS
@pytest.mark.parametrize("adapter", [{"kind": "lora", "rank": 4}, pytest.param({}, marks=pytest.mark.tier("all"))])
def test_greedy_answers_are_the_library_s_own(backend, adapter, new_rig, asked, chat_model):
    rig = new_rig(backend, model__path=str(chat_model), data__tokenizer="model", adapter=adapter)
    for step in (1, 2, 3):
        rig.train(step, 4)
    found = [answer.text for answer in asked(rig, "import random", CHAT)]
    own = rig.backend._model
    expected = (by_transformers if backend == "torch" else by_mlx_lm)(own, chat_model)
    assert found == expected
    assert all(found)


def texts_of(tokenizer):
    messages = [{"role": each.role, "content": each.content} for each in CHAT]
    return [
        tokenizer.encode("import random", add_special_tokens=False),
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"],
    ]


def by_transformers(model, folder):
    import torch
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    made = []
    model.eval()
    for ids in texts_of(tokenizer):
        out = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=12,
                             do_sample=False)  # fmt: skip
        made.append(tokenizer.decode(out[0, len(ids) :], skip_special_tokens=True))
    return made


def by_mlx_lm(model, folder):
    from mlx_lm import stream_generate
    from mlx_lm.utils import load_tokenizer

    tokenizer: Any = load_tokenizer(folder)
    model.eval()
    made = ([part.token for part in stream_generate(model, tokenizer, ids, max_tokens=12)]
            for ids in texts_of(tokenizer._tokenizer))  # fmt: skip
    return [tokenizer.decode(tokens, skip_special_tokens=True) for tokens in made]


def test_byte_tokens_answer_in_text_and_what_cannot_be_asked_is_refused_in_a_line(new_rig, asked):
    rig = new_rig("mlx")
    (answer,) = asked(rig, "def é", max_tokens=7)
    assert (answer.prompt, answer.ended) == ("def é", answer.tokens < 7)
    assert len(answer.text.encode()) <= ANSWER_BYTES
    for prompt, problem in ((CHAT, "messages need a chat template"), ("x" * 9000, "has 9000 tokens; the model's")):
        with pytest.raises(InvalidInputError, match=problem):
            asked(rig, prompt)


def test_what_is_too_long_for_a_report_is_cut_between_characters():
    assert [cut("naïve", size) for size in (2, 3, 4, 6, 7)] == ["na", "na", "naï", "naïve", "naïve"]


def test_a_fence_ends_it_at_the_next_token(new_rig, asked, monkeypatch):
    rig, looks = new_rig("mlx"), []
    check = rig.progress.check

    def fenced(generation):
        looks.append(generation)
        if len(looks) == 4:
            raise AbandonedError
        check(generation)

    monkeypatch.setattr(rig.progress, "check", fenced)
    before = state_bytes(rig.backend.export_state())
    with pytest.raises(AbandonedError):
        asked(rig, "def", temperature=1.0, max_tokens=500)
    assert len(looks) == 4
    assert state_bytes(rig.backend.export_state()) == before


PROMPT, TOKENS = "return self", 24
RULES: dict[str, Any] = {
    "no_repeat_ngram_size": 2, "repetition_penalty": 1.5, "min_length": 20, "encoder_repetition_penalty": 1.2,
    "max_length": 12, "num_beams": 3, "length_penalty": 2.0, "do_sample": True, "temperature": 0.6, "top_k": 5,
}  # fmt: skip
"""Settings that change what is generated; the tokens that are suppressed or forced depend on the model."""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    return {"llama": make_chat_model(folder / "llama"), "bart": make_seq2seq_model(folder / "bart", "bart")}


@pytest.fixture
def open_answerer(run_file):
    """Load a model for answers: `open_answerer("torch", folder)`."""

    def make(backend, folder, **changes):
        config = run_file(model__path=str(folder), data__tokenizer="model", **changes)
        loaded = load(config, NodeTable(backend=backend, device="cpu", threads=1), "run.toml", trains=False)
        tokenizer = row_tokenizer(folder, "model", "run.toml")
        return Answerer(loaded, tokenizer, longest_context(folder), plain=False)

    return make


SEQ2SEQ = {"objective": {"kind": "seq2seq"}, "data__kind": "rows", "data__sequence_length": 96}


def with_settings(model: Path, folder: Path, settings: dict[str, Any], file: str = "generation_config.json") -> Path:
    """Return a copy of a model whose file of that name has settings more."""
    shutil.copytree(model, folder)
    path = folder / file
    stated = json.loads(path.read_text("utf-8")) if path.exists() else {}
    path.write_text(json.dumps(stated | settings), "utf-8")
    return folder


def tokens_of(answerer, folder, options):
    """Return the tokens that `answerer` generates."""
    made = []
    generate = answerer._backend.generate
    answerer._backend.generate = lambda *args: made.append(generate(*args)) or made[-1]
    answerer.answer(PROMPT, answerer.decoding(options, folder), lambda: None)
    return made[0]


def likeliest(folder: Path, ends: tuple[int, ...]) -> list[int]:
    """Return the likeliest tokens after the prompt, one pass of transformers' model for each."""
    import torch
    import transformers

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    config = json.loads((folder / "config.json").read_text("utf-8"))
    if config.get("is_encoder_decoder"):
        model: Any = transformers.AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
        start = torch.tensor([[config["decoder_start_token_id"]]])
    else:
        model, start = transformers.AutoModelForCausalLM.from_pretrained(folder).eval(), given
    made = start
    while made.shape[1] < start.shape[1] + TOKENS and (made is start or int(made[0, -1]) not in ends):
        with torch.no_grad():
            passed = model(input_ids=given, decoder_input_ids=made) if start is not given else model(input_ids=made)
        made = torch.cat([made, passed.logits[:, -1:].argmax(-1)], 1)
    return [int(token) for token in made[0, start.shape[1] :]]


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize(("backend", "name"), [("torch", "llama"), ("mlx", "llama"), ("torch", "bart")])
def test_answers_are_the_likeliest_tokens(backend, name, file, plain, open_answerer, tmp_path):
    changes = SEQ2SEQ if name == "bart" else {}
    expected = likeliest(plain[name], ())
    rules = RULES | {"suppress_tokens": expected[:1], "forced_bos_token_id": 7, "forced_eos_token_id": 8}
    folder = with_settings(plain[name], tmp_path / "model", rules, file)
    answerer = open_answerer(backend, folder, **changes)
    assert tokens_of(answerer, folder, AnswerOptions(max_tokens=TOKENS)) == likeliest(plain[name], end_tokens(folder))
    place = next(at for at, token in enumerate(expected) if at > 2 and token not in expected[:at])
    end = {"eos_token_id": [*end_tokens(folder), expected[place]]}
    ended = with_settings(folder, tmp_path / "ended", end)
    answerer = open_answerer(backend, ended, **changes)
    made = tokens_of(answerer, ended, AnswerOptions(max_tokens=TOKENS))
    assert made == expected[: place + 1] == likeliest(plain[name], end_tokens(ended))


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("name", ["llama", "bart"])
@pytest.mark.parametrize("adapter", [{}, {"kind": "lora", "rank": 2}], ids=["full", "lora"])
def test_settings_that_are_asked_for_are_applied_as_by_transformers(
    name, adapter, file, plain, open_answerer, tmp_path
):
    import transformers

    rules = RULES | {"suppress_tokens": likeliest(plain[name], ())[:1]}
    folder = with_settings(plain[name], tmp_path / "model", rules, file)
    if file == "config.json":
        (folder / "generation_config.json").unlink(missing_ok=True)
    answerer = open_answerer("torch", folder, adapter=adapter, **(SEQ2SEQ if name == "bart" else {}))
    made = tokens_of(answerer, folder, AnswerOptions(max_tokens=TOKENS, use_generation_config=True))
    loader: Any = transformers.AutoModelForSeq2SeqLM if name == "bart" else transformers.AutoModelForCausalLM
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    given = tokenizer(PROMPT, return_tensors="pt")["input_ids"]
    model = loader.from_pretrained(folder)
    assert model.generation_config.num_beams == 3
    ours = {"max_new_tokens": TOKENS, "max_length": None, "do_sample": False, "eos_token_id": [*end_tokens(folder)]}
    whole = model.generate(given, **ours)[0].tolist()
    assert made == whole[1 if name == "bart" else given.shape[1] :]
    assert made != tokens_of(answerer, folder, AnswerOptions(max_tokens=TOKENS))


def test_a_decoder_begins_as_generation_config_says(plain, open_answerer, tmp_path):
    folder = with_settings(plain["bart"], tmp_path / "model", {"decoder_start_token_id": 9})
    config = json.loads((folder / "config.json").read_text("utf-8"))
    expected = with_settings(plain["bart"], tmp_path / "other", {"decoder_start_token_id": 9}, "config.json")
    del config["decoder_start_token_id"]
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    answerer = open_answerer("torch", folder, **SEQ2SEQ)
    made = tokens_of(answerer, folder, AnswerOptions(max_tokens=TOKENS))
    assert made == likeliest(expected, end_tokens(folder)) != likeliest(plain["bart"], end_tokens(folder))


def test_what_cannot_be_applied_is_refused_in_a_line(plain, open_answerer, tmp_path):
    asked = AnswerOptions(use_generation_config=True)
    answerer = open_answerer("mlx", plain["llama"])
    with pytest.raises(InvalidInputError, match=r"^use_generation_config: MLX doesn't apply .*torch answer$"):
        answerer.decoding(asked, plain["llama"])
    folder = with_settings(plain["llama"], tmp_path / "model", {"stop_strings": ["x"]})
    answerer = open_answerer("torch", folder)
    with pytest.raises(InvalidInputError, match="stop_strings"):
        answerer.decoding(asked, folder)


@pytest.mark.parametrize(
    ("node", "here", "b", "is_refused"),
    [
        ("", "mlx", "mlx", True),
        ("b", "torch", "mlx", True),
        ("here", "torch", "mlx", False),
        ("", "auto", "mlx", False),
    ],
)
def test_a_run_file_whose_answers_come_from_mlx_is_refused(run_file, node, here, b, is_refused):
    tables = {"nodes__here": {"backend": here}, "nodes__b": {"backend": b}}
    settings = {"samples": {"use_generation_config": True, "node": node}, **tables}
    if not is_refused:
        assert run_file(**settings).samples.use_generation_config
        return
    with pytest.raises(InvalidInputError, match=r"samples\.use_generation_config: MLX doesn't apply"):
        run_file(**settings)
