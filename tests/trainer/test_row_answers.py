"""Rows answered as prompts: by the row's number alone, cut to what a message holds, and errors in their place."""

import json

import msgspec
import pytest
from tests.trainer.support.chat_model import make_chat_model

from trainctl.protocol.messages import AnswerOptions
from trainctl.protocol.messages.requests import ANSWER_BYTES, SLICE_ROWS
from trainctl.protocol.wire.codec import CONTROL_FRAME_BYTES
from trainctl.trainer.backends.passes import Decoding
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.trainer.step.sampler import Answerer
from trainctl.trainer.worker import RowAnswerer, fitting, row_seed

CHAT = [{"role": "system", "content": "Answer."}, {"role": "user", "content": "What is a loop?"}]
ROWS = [
    json.dumps(row) for row in (
        {"prompt": "def x"}, {"prompt": "def x", "completion": "not read"}, {"prompt": CHAT}, {"messages": CHAT},
    )
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("answers") / "model")


class Recorded:
    """A backend that answers with fixed tokens, and notes what it was asked."""

    def __init__(self, tokens):
        self.tokens, self.asked = tokens, list[tuple[list[int], Decoding]]()

    def generate(self, prompt, how, ends, on_token):
        self.asked.append(([*prompt], how))
        return self.tokens[: how.max_tokens]


def answerer(backend, model, options, longest=None):
    made = Answerer(backend, row_tokenizer(model, "model", "run.toml"), longest, plain=False)
    return RowAnswerer(made, made.decoding(options, model))


def test_each_form_of_a_prompt_is_asked_with_the_row_s_own_seed(model):
    backend = Recorded([5, 6])
    found = answerer(backend, model, AnswerOptions(max_tokens=8, temperature=0.5, top_p=0.9, seed=3)).process(10, ROWS)
    assert {(one["tokens"], one["ended"], "cut" in one) for one in found} == {(2, False, False)}
    (first, second, third, fourth), how = [tokens for tokens, _ in backend.asked], [how for _, how in backend.asked]
    assert first == second and third == fourth != first
    assert [one.seed for one in how] == [row_seed(3, number) for number in range(10, 14)]
    assert len({one.seed for one in how} | {row_seed(4, 10)}) == 5
    assert (how[0].max_tokens, how[0].temperature, how[0].top_p) == (8, 0.5, 0.9)
    again = Recorded([5, 6])
    answerer(again, model, AnswerOptions(max_tokens=8, temperature=0.5, top_p=0.9, seed=3)).process(12, ROWS[2:])
    assert again.asked == backend.asked[2:]


def test_bad_rows_have_an_error_in_their_place(model):
    only = [{"role": "assistant", "content": "It repeats."}]
    bad = [
        "{",
        '{"text": "a"}',
        '{"prompt": ""}',
        json.dumps({"messages": only}),
        '{"prompt": "' + "a b " * 99 + '"}',
    ]
    found = answerer(Recorded([5]), model, AnswerOptions(), longest=64).process(0, [ROWS[0], *bad])
    assert found[0]["tokens"] == 1
    says = ("not a JSON object", "needs", "needs", "has only an answer", "the model's context has 64")
    for one, part in zip(found[1:], says, strict=True):
        assert part in one["error"]


def test_an_answer_at_the_end_of_messages_is_left_out(model):
    whole = [*CHAT, {"role": "assistant", "content": "It repeats."}]
    backend = Recorded([5])
    rows = [json.dumps({"messages": messages}) for messages in (CHAT, whole)]
    answerer(backend, model, AnswerOptions()).process(0, rows)
    assert backend.asked[0][0] == backend.asked[1][0]


@pytest.mark.parametrize("text", ["plain", "\x00" * 9000, "\u00e4\U0001f600" * 4000, "a" * ANSWER_BYTES])
def test_the_answers_of_a_slice_fit_into_a_request(text):
    kept = fitting(text, ANSWER_BYTES)
    size = len(msgspec.json.encode(kept))
    assert text.startswith(kept) and size <= ANSWER_BYTES
    assert kept == text or size > ANSWER_BYTES - 16
    assert SLICE_ROWS["answers"] * (ANSWER_BYTES + 200) + 2000 < CONTROL_FRAME_BYTES
