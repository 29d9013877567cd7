"""Tokens and masks of rows: by the three rules for chat templates, and as TRL has them."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.chat_model import CHATML, VOCABULARY, make_chat_model, questions, tokenizer, write_rows

from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.chat_template import TEMPLATE_DATE
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.data.row_tokens import RowTokenizer, row_tokenizer
from trainctl.trainer.data.rows import Completion, Conversation, Text, prompt_of, row_of

TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr,arg-type]
TALK = [
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "It is 4."},
]
REASONED = [TALK[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello."}, *TALK[2:]]
GENERATION = CHATML.replace(
    "{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}",
    "{{ '<|im_start|>' + message.role + '\\n' }}{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + '<|im_end|>' }}{% endgeneration %}{{ '\\n' }}{% else %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endif %}",
)


def counted(made, row):
    """The whole text, and what counts of it."""
    ((tokens, mask),) = made.encode([row])
    decode: Callable[..., str] = made._tokenizer.decode
    return decode(tokens), decode([token for token, flag in zip(tokens, mask, strict=True) if flag])


def with_template(template):
    return RowTokenizer(tokenizer(template), Path("model"))


@pytest.mark.parametrize("talk", [TALK, REASONED], ids=["plain", "reasoned"])
@pytest.mark.parametrize("name", ["cohere", "gemma3", "llama3", "phi3", "qwen2_5_vl"])
def test_untagged_templates_count_what_the_tagged_ones_mark(name, talk):
    """TRL has each of these templates with `{% generation %}` too."""
    plain, tagged = (
        counted(with_template((TEMPLATES / f"{file}.jinja").read_text("utf-8")), Conversation("x", talk))
        for file in (name, f"{name}_training")
    )
    assert plain == tagged


def test_a_turn_whose_reasoning_is_cut_later_is_found_by_its_content():
    """Qwen3's template drops the reasoning of all turns but the last."""
    made = with_template((TEMPLATES / "qwen3.jinja").read_text("utf-8"))
    assert counted(made, Conversation("x", REASONED))[1] == (
        "Hello.<|im_end|>\n<think>\n\n</think>\n\nIt is 4.<|im_end|>\n"
    )


@pytest.mark.parametrize("turns", [1, 2, 3])
def test_a_conversation_that_the_assistant_begins_counts_no_system_prompt(turns):
    """As Qwen2.5's template, which writes a system prompt of its own."""
    system = "{{ '<|im_start|>system\nYou are a model.<|im_end|>\n' }}"
    found = counted(with_template(system + CHATML), Conversation("x", TALK[1 : 1 + turns]))
    assert found[0].startswith("<|im_start|>system\nYou are a model.<|im_end|>\n<|im_start|>assistant\nHello.")
    assert found[1] == "Hello.<|im_end|>\n" + "It is 4.<|im_end|>\n" * (turns > 2)


CALLING = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2, "b": 2}}}]},
    {"role": "tool", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3"])
def test_calls_of_tools_count(name):
    """Qwen3's template writes an empty thought only before the last turn, so the call is no prefix of the whole."""
    made = with_template((TEMPLATES / f"{name}.jinja").read_text("utf-8"))
    text, learned = counted(made, row_of({"messages": CALLING, "tools": [ADD]}, "x"))
    assert '{"type": "function", "function": {"name": "add", "parameters"' in text
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call><|im_end|>\n'
    first, found, last = learned.partition(call)
    assert found and not first.strip() and last.endswith("It is 4.<|im_end|>\n") and "response" not in last
    tokens = made.prompt(prompt_of({"prompt": CALLING[:1], "tools": [ADD]}, "x"), plain=False)
    assert text.startswith(made._tokenizer.decode(tokens))


@pytest.mark.parametrize("row", [{"messages": CALLING}, {"messages": TALK, "tools": [ADD]}])
def test_a_template_without_tools_is_refused_for_a_row_with_tools(row):
    with pytest.raises(InvalidInputError, match="x: the chat template of model leaves out the tool 'add'; use one"):
        counted(with_template(CHATML), row_of(row, "x"))


def test_tools_select_a_template_of_their_own():
    made: Any = with_template(None)
    made._tokenizer.chat_template = {"default": CHATML, "tool_use": "{{ tools }}" + CHATML}
    assert counted(made, Conversation("x", TALK))[0].startswith("<|im_start|>user")
    assert counted(made, Conversation("x", TALK, tools=[ADD]))[0].startswith("[{'type': 'function'")
    made._tokenizer.chat_template = {"rag": CHATML}
    with pytest.raises(InvalidInputError, match=r"x: the chat template of model refuses it: .*no default"):
        counted(made, Conversation("x", TALK))


@pytest.mark.parametrize("text", ["%d %b %Y", "%A, %B %-d, %Y", "%H:%M:%S"])
def test_a_template_that_writes_today_s_date_gets_a_fixed_one(text):
    macro = (
        "{% macro head() %}{% if strftime_now is defined %}{{ strftime_now('" + text + "') }}{% endif %}{% endmacro %}"
    )
    made = with_template("\n" + macro + "{{ head() }};" + CHATML)
    whole, _ = counted(made, Conversation("x", TALK))
    date = TEMPLATE_DATE.strftime(text.replace("%-d", "1"))
    assert whole.startswith(f"\n{date};<|im_start|>user")
    assert made._tokenizer.decode(made.prompt(Conversation("x", TALK[:1]), plain=False)).startswith(f"\n{date};")


def test_only_the_turns_of_the_completion_count():
    row = row_of({"prompt": TALK[:3], "completion": TALK[3:]}, "x")
    assert counted(with_template(CHATML), row)[1] == "It is 4.<|im_end|>\n"
    assert counted(with_template(GENERATION), row)[1] == "It is 4.<|im_end|>"


def test_a_template_that_does_not_nest_is_refused():
    """The prompt says how many messages follow, so no turn can be separated from what is before it."""
    backwards = CHATML.replace(
        "{% for message in messages %}", "{{ messages | length }}{% for message in messages | reverse %}"
    )
    with pytest.raises(
        InvalidInputError, match=r"x: no rule finds the assistant's turns in model's chat template: turn \d"
    ):
        counted(with_template(backwards), Conversation("x", TALK))


def test_a_template_s_own_refusal_names_the_row():
    made = with_template((TEMPLATES / "gemma.jinja").read_text("utf-8"))
    with pytest.raises(InvalidInputError, match=r"x: the chat template of model refuses it: System role not supported"):
        counted(made, Conversation("x", [{"role": "system", "content": "Be brief."}, *TALK]))
    with pytest.raises(InvalidInputError, match="messages need a chat template, and model has none"):
        counted(RowTokenizer(tokenizer(None), Path("model")), Conversation("x", TALK))


def test_a_completion_counts_from_where_it_leaves_its_prompt_and_ends():
    made = with_template(CHATML)
    assert counted(made, Completion("x", "x = se", "lf.a")) == ("x = self.a<|im_end|>", " self.a<|im_end|>")
    assert counted(made, Text("x", "hello")) == ("hello<|im_end|>", "hello<|im_end|>")
    assert counted(made, Text("x", "hello<|im_end|>"))[0] == "hello<|im_end|>", "an end is not added twice"


@pytest.fixture
def opened(tmp_path, run_file):
    model = make_chat_model(tmp_path / "model")

    def make(rows, **changes):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        told = {"data__path": str(path), "data__kind": "rows", "data__tokenizer": "model", "data__held_out": 0.0}
        config = run_file(model__path=str(model), **(told | changes))
        return open_dataset(config, tmp_path / "caches", "run.toml")

    return make


def test_masks_are_trl_s(opened, tmp_path):
    import datasets
    import trl

    rows = questions(40)
    ours = opened(rows, data__sequence_length=400)
    config = trl.SFTConfig(str(tmp_path / "trl"), report_to=[], use_cpu=True, max_length=None)
    made = trl.SFTTrainer(
        str(tmp_path / "model"),
        config,
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=tokenizer(),
    )
    for index, theirs in enumerate(made.train_dataset):
        tokens, flags = ours._sample(index)
        assert [*tokens] == theirs["input_ids"]
        assert [t if flag else -100 for t, flag in zip(tokens[1:], flags, strict=True)] == theirs["labels"][1:]


def test_rows_above_the_sequence_length_are_cut_dropped_or_refused(opened):
    rows = [{"text": "ab " * size} for size in (2, 30, 3, 40)]
    cut = opened(rows, data__sequence_length=20)
    assert (cut.samples, cut.truncated, cut.left_out) == (4, 2, 0)
    dropped = opened(rows, data__sequence_length=20, data__overlong="drop")
    assert (dropped.samples, dropped.truncated, dropped.left_out) == (2, 0, 2)
    with pytest.raises(
        InvalidInputError,
        match=r"rows.jsonl: line 2 is \d+ tokens long; data.sequence_length = 20 allows 21, and 1 more; set",
    ):
        opened(rows, data__sequence_length=20, data__overlong="refuse")


def test_a_prompt_longer_than_the_sequence_is_refused_by_line(opened):
    rows = [{"prompt": "a", "completion": "b"}, {"prompt": "ab " * 40, "completion": "c"}]
    with pytest.raises(InvalidInputError, match=r"rows.jsonl: line 2 has nothing to learn within its first 21 tokens"):
        opened(rows, data__sequence_length=20)
    assert opened(rows, data__sequence_length=20, data__overlong="drop").samples == 1


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"vocab_size": 300}, r"data.tokenizer: produces token IDs up to 511, but the model has 300"),
        (None, r"data.tokenizer: cannot read the tokenizer in "),
    ],
)
def test_a_tokenizer_that_does_not_fit_is_refused(opened, tmp_path, change, what):
    config = tmp_path / "model" / "config.json"
    if change is None:
        (tmp_path / "model" / "tokenizer.json").write_text("{}", "utf-8")
    else:
        config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | change), "utf-8")
    with pytest.raises(InvalidInputError, match=what):
        opened([{"text": "a"}])


@pytest.mark.parametrize("kind", ["rows", "text"])
def test_an_added_token_that_the_model_lacks_is_refused_where_it_occurs(opened, tmp_path, kind):
    """As Gemma 3's <image_soft_token>, whose id is just above the vocabulary of its text models."""
    path = tmp_path / "model" / "tokenizer.json"
    more = json.loads(path.read_text("utf-8"))
    more["added_tokens"].append({**more["added_tokens"][-1], "id": VOCABULARY, "content": "<image>"})
    path.write_text(json.dumps(more), "utf-8")
    rows, text = [{"text": "a"}, {"text": "b <image>"}], tmp_path / "text.txt"
    change = {"data__path": str(text), "data__kind": "text", "data__sequence_length": 2} if kind == "text" else {}
    text.write_text("import random", "utf-8")
    assert opened(rows[:1], **change).samples
    text.write_text("import random <image>", "utf-8")
    with pytest.raises(InvalidInputError) as caught:
        opened(rows, **change)
    place = "text.txt" if kind == "text" else "rows.jsonl: line 2"
    assert f"{place}: has the token ID 512, but the model has 512 (config.json: vocab_size)" in str(caught.value)


def test_bytes_need_no_tokenizer_and_have_no_template(tmp_path):
    made = row_tokenizer(tmp_path, "bytes", "run.toml")
    assert [*made.encode([Completion("x", "é", "b")])] == [([195, 169, 98, 257], [False, False, True, True])]
    with pytest.raises(InvalidInputError, match="messages need a chat template"):
        list(made.encode([Conversation("x", TALK)]))
