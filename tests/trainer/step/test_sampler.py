"""The model's answers between steps: as the libraries' own, and without a trace in what training reads."""

from typing import Any

import numpy as np
import pytest

from trainctl.protocol import messages as m
from trainctl.protocol.config.prompts import ChatMessage
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record.status_page import StatusWriter
from trainctl.trainer.common.errors import AbandonedError
from trainctl.trainer.step.sampler import ANSWER_BYTES, Sampler, cut

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
