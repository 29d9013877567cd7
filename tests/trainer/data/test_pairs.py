"""Rows with a chosen and a rejected answer, and what is refused of them."""

from typing import Any

import pytest

from trainctl.protocol.config import run_file
from trainctl.protocol.config.input_checks import check_rows
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.rows import Completion, Conversation, pair_of

USER = {"role": "user", "content": "2+2?"}
RIGHT, WRONG = ({"role": "assistant", "content": text} for text in ("4", "5"))


def test_each_form_of_a_pair_has_two_halves():
    text = {"prompt": "2+2?", "chosen": "4", "rejected": "5", "id": 3}
    assert pair_of(text, "x") == (Completion("x", "2+2?", "4"), Completion("x", "2+2?", "5"))
    talks = Conversation("x", [USER, RIGHT], 1), Conversation("x", [USER, WRONG], 1)
    assert pair_of({"prompt": [USER], "chosen": [RIGHT], "rejected": [WRONG]}, "x") == talks
    assert pair_of({"chosen": [USER, RIGHT], "rejected": [USER, WRONG]}, "x") == talks


@pytest.mark.parametrize(
    ("fields", "where", "says"),
    [
        ([], "x", "not a JSON object"),
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
