"""Rows of training data and pairs: what is read, and what is refused in one line."""

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainctl.protocol.config import run_file
from trainctl.protocol.config.input_checks import check_rows
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data import rows
from trainctl.trainer.data.rows import (
    Completion,
    Conversation,
    Text,
    fields_of,
    pair_of,
    prompt_of,
    row_chunks,
    row_of,
    rows_in,
)

USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}


def read_rows(path):
    return (row for chunk in row_chunks(path) for row in rows_in(chunk))


def test_each_kind_of_row_is_read_and_other_fields_are_left_alone():
    assert row_of({"text": "a", "id": 3}, "x") == Text("x", "a")
    assert row_of({"text": "a", "chosen": "b", "rejected": "c"}, "x") == Text("x", "a")
    assert row_of({"prompt": "a", "completion": "b", "text": None}, "x") == Completion("x", "a", "b")
    assert row_of({"messages": [USER, ASSISTANT]}, "x") == Conversation("x", [USER, ASSISTANT])
    assert row_of({"prompt": [USER], "completion": [ASSISTANT]}, "x") == Conversation("x", [USER, ASSISTANT], 1)


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALLING = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
}


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL])])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}])
def test_tools_and_their_calls_are_kept(tools, content):
    calling = CALLING | content
    expected = Conversation("x", [USER, calling], 0, [TOOL])
    assert row_of({"messages": [USER, calling], "tools": tools}, "x") == expected
    prompted = row_of({"prompt": [USER], "completion": [calling], "tools": tools}, "x")
    assert prompted == dataclasses.replace(expected, first=1)
    assert prompt_of({"prompt": [USER], "tools": tools}, "x") == Conversation("x", [USER], 0, [TOOL])


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "H"}, {"type": "text", "text": "i"}]
    assert row_of({"messages": [USER | {"content": parts}, ASSISTANT]}, "x") == Conversation("x", [USER, ASSISTANT])


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({}, 'needs "text", "prompt" and "completion", or "messages"; it has no field'),
        ({"text": ""}, "line 1: text: is empty"),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, 'pairs with objective.kind = "dpo" or "orpo"'),
        ({"chosen": [USER, ASSISTANT], "rejected": [USER, ASSISTANT]}, "line 1: has a chosen and a rejected answer"),
        ({"prompt": "a", "completion": ""}, "line 1: completion: is empty, so the row has nothing to learn"),
        ({"prompt": "a", "completion": [ASSISTANT]}, "must both be text or both be lists of messages"),
        ({"messages": [USER]}, "line 1: no assistant turn, so the row has nothing to learn"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "messages[1]: the assistant's content is empty"),
        ({"messages": [USER, {"role": "assistant"}]}, 'messages[1]: a message needs a "content" of text'),
        ({"messages": [{"content": "a"}]}, 'messages[0]: a message needs a "role"'),
        ({"messages": [USER | {"content": [{"type": "image"}]}]}, 'the content has a part of type "image"; parts must'),
        ({"messages": [USER, CALLING | {"tool_calls": [3]}]}, '"tool_calls" must be a list of JSON objects'),
        ({"messages": [USER, ASSISTANT], "tools": "[{"}, "line 1: tools: not a JSON list: "),
        ({"text": "\ud800"}, "line 1: text: contains half of a surrogate pair, which is not valid text"),
    ],
)
def test_a_row_that_teaches_nothing_is_refused_by_line_and_field(row, says):
    with pytest.raises(InvalidInputError) as caught:
        row_of(row, "line 1")
    assert says in str(caught.value) and "\n" not in str(caught.value)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["role", "content", "prompt", "completion", "messages", "text"]), inner)
    ),
    max_leaves=8,
)


@given(JSON)
def test_whatever_a_row_is_it_is_read_or_refused(row):
    try:
        found = row_of(fields_of(json.dumps(row), "x"), "x")
    except InvalidInputError:
        return
    assert isinstance(found, Text | Completion | Conversation)


def test_a_file_s_lines_are_counted_with_its_blank_ones(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n\n  \n{"text": "b"}\n{"text": 3}\n', "utf-8")
    with pytest.raises(InvalidInputError, match=r"rows.jsonl: line 5: needs"):
        list(read_rows(path))
    for broken in ('{"text": ', "[]", "3"):
        path.write_text('{"text": "a"}\n' + broken + "\n", "utf-8")
        with pytest.raises(InvalidInputError, match=r"line 2: not a JSON object"):
            list(read_rows(path))


def test_parquet_holds_the_same_rows(tmp_path):
    import pyarrow
    import pyarrow.parquet

    rows: list[Any] = [
        {"prompt": "a", "completion": "b"},
        {"messages": [USER, ASSISTANT, USER, CALLING]},
        {"text": "c"},
    ]
    table = pyarrow.Table.from_pylist(
        [{"prompt": None, "completion": None, "messages": None, "text": None, **row} for row in rows]
    )
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    parquet, jsonl = (
        [dataclasses.replace(row, place="x") for row in read_rows(tmp_path / f"rows.{kind}")]
        for kind in ("parquet", "jsonl")
    )
    assert parquet == jsonl
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(InvalidInputError, match="not a readable Parquet file"):
        list(read_rows(tmp_path / "rows.parquet"))


def test_a_line_longer_than_any_row_is_named_and_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1000)
    (tmp_path / "rows.jsonl").write_bytes(b'{"text": "a"}\n{"text": "' + b"a" * 1000 + b'"}\n')
    with pytest.raises(InvalidInputError, match=r"rows\.jsonl: line 2: longer than "):
        list(read_rows(tmp_path / "rows.jsonl"))


ASKED = {"role": "user", "content": "2+2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))


def test_each_form_of_a_pair_has_two_halves():
    text = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "id": 3}
    assert pair_of(text, "x") == (Completion("x", "2+2?", "4"), Completion("x", "2+2?", "5"))
    talks = Conversation("x", [ASKED, RIGHT], 1), Conversation("x", [ASKED, WRONG], 1)
    assert pair_of({"prompt": [ASKED], "chosen": [RIGHT], "rejected": [WRONG]}, "x") == talks
    assert pair_of({"chosen": [ASKED, RIGHT], "rejected": [ASKED, WRONG]}, "x") == talks


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        ({"prompt": "a", "completion": "b"}, "x", '"chosen" and "rejected"'),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "x", "are equal"),
        ({"chosen": "a", "rejected": "b"}, "x: prompt", "is missing"),
        ({"chosen": [RIGHT], "rejected": [WRONG]}, "x", "no first message in common"),
        ({"prompt": "a", "chosen": 3, "rejected": "b"}, "x: chosen", "must be text or a list of messages"),
    ],
)
def test_what_is_no_pair_is_refused_by_its_place(fields, where, says):
    with pytest.raises(InvalidInputError) as refused:
        pair_of(fields, "x")
    assert (refused.value.where, says in refused.value.problem) == (where, True), refused.value


def test_pairs_for_another_objective_are_named_before_a_run(tmp_path):
    rows = tmp_path / "pairs.jsonl"
    rows.write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "utf-8")
    with pytest.raises(InvalidInputError, match=r'line 1: has a chosen .* with objective\.kind = "dpo" or "orpo"'):
        check_rows(rows, "data.path")
    check_rows(rows, "data.path", pairs=True)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": {"kind": "samples"}}, "data.kind"),
        ({"data": {"packing": "best-fit"}}, "data.packing"),
        ({"data": {"growing": True, "held_out": 0.0}}, "data.growing"),
        ({"adapter": {"kind": "full"}, "objective": {"reference": "adapter-off"}}, "objective.reference"),
        ({"objective": {"kind": "orpo", "reference": "cached"}}, "objective.reference"),
        ({"objective": {"reference": "cached"}, "data": {"growing": True, "held_out": 0.0}}, "data.growing"),
        ({"objective": {"label_smoothing": 0.1}}, "objective.label_smoothing"),
        ({"objective": {"kind": "orpo", "loss": "ipo"}}, "objective.loss"),
    ],
)
def test_what_preferences_cannot_do_is_refused_by_its_field(changes, field):
    raw: dict[str, Any] = {
        "run": {"name": "p", "steps": 3},
        "model": {"path": "/m"},
        "data": {"path": "/pairs.jsonl", "kind": "rows"},
        "batch": {"global": 8},
        "optimizer": {"learning_rate": 1e-5},
        "adapter": {"kind": "lora"},
        "objective": {"kind": "dpo"},
    }
    run_file.parse(raw)
    run_file.parse(raw | {"objective": {"kind": "orpo"}, "adapter": {"kind": "full"}})
    run_file.parse(raw | {"adapter": {"kind": "full"}})
    with pytest.raises(InvalidInputError, match=field):
        run_file.parse({table: values | changes.get(table, {}) for table, values in raw.items()})
