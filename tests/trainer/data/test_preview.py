"""A preview counts what the run would train on, and shows samples token by token."""

import importlib.util
import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
from tests.trainer.support.chat_model import make_chat_model, questions, write_rows

from trainctl.protocol.batch.data_statistics import DataStatistics, TemplateUse, without_end
from trainctl.protocol.errors import InvalidInputError
from trainctl.trainer.data.dataset import open_dataset
from trainctl.trainer.data.preview import preview
from trainctl.trainer.data.row_tokens import row_tokenizer
from trainctl.tui.setup.data_preview import statistics_lines

TEMPLATES = Path(importlib.util.find_spec("trl").origin).parent / "chat_templates"  # type: ignore[union-attr,arg-type]


@pytest.fixture
def rows_file(tmp_path, run_file):
    model = make_chat_model(tmp_path / "model")

    def make(rows, **changes):
        path = write_rows(tmp_path / "rows.jsonl", rows)
        settings = {"data__path": str(path), "data__kind": "rows", "data__tokenizer": "model"}
        return run_file(model__path=str(model), **(settings | changes))

    return make


def test_it_counts_what_the_run_trains_on(rows_file, tmp_path):
    rows = questions(40)
    config = rows_file([*rows, rows[0], rows[1]], data__sequence_length=60)
    found, dataset = preview(config, 2, "run.toml"), open_dataset(config, tmp_path / "caches", "run.toml")
    everything = dataset._batch(dataset._usable)
    assert (found.samples, found.held_out) == (dataset.samples + dataset.held_out, dataset.held_out) == (42, 2)
    assert (found.tokens, found.counted) == (everything.tokens, everything.weight)
    assert found.duplicates == 42 - len({(row["prompt"], row["completion"]) for row in rows})
    assert found.truncated == dataset.truncated > 0
    assert found.lengths["p100"] > 61 and 0 < found.padding < 1
    packed = rows_file([*rows, rows[0], rows[1]], data__sequence_length=60, data__packing="best-fit")
    packs = open_dataset(packed, tmp_path / "packs", "run.toml")
    assert found.packs == preview(packed, 0, "run.toml").packs == packs.samples < dataset.samples
    assert found.pack_efficiency == packs.targets(np.arange(packs.samples)).mean() / 60
    assert found.shown[1].place.endswith("rows.jsonl: line 2")


def test_shown_tokens_are_the_row_s_text_and_its_completion_counts(rows_file):
    (sample,) = preview(rows_file([{"prompt": "def é(", "completion": "x): ü"}] * 3), 1, "run.toml").shown
    assert "".join(text for text, _ in sample.tokens) == "def é(x): ü<|im_end|>"
    assert "".join(text for text, counted in sample.tokens if counted) == "x): ü<|im_end|>"


def test_of_a_pair_both_answers_are_shown_and_counted(rows_file):
    pairs = [{"prompt": "2+2=", "chosen": "4", "rejected": "5, or so"}] * 9
    config = rows_file(pairs, objective__kind="orpo", data__held_out=0.0)
    found = preview(config, 1, "run.toml")
    assert (found.unit, found.samples, found.packs) == ("pairs", 9, None)
    (sample,) = found.shown
    assert "".join(text for text, _ in sample.tokens) == "2+2=4<|im_end|>"
    assert "".join(text for text, counted in sample.rejected if counted) == "5, or so<|im_end|>"
    assert found.tokens == 9 * (len(sample.tokens) + len(sample.rejected) - 2)
    assert found.padding == pytest.approx(1 - found.tokens / (9 * 2 * (len(sample.rejected) - 1)))


def test_pairs_that_are_equal_as_far_as_they_are_read_teach_nothing(rows_file, tmp_path):
    pairs = [{"prompt": "2+2=", "chosen": f"{n}", "rejected": f"{n + 5}"} for n in range(4)]
    late = {"prompt": "2+2=", "chosen": "4, and 5" + " or so" * 12 + "4", "rejected": "4, and 5" + " or so" * 12 + "5"}
    settings = {"objective__kind": "orpo", "data__held_out": 0.0, "data__sequence_length": 20}
    with pytest.raises(InvalidInputError, match=r"line 5 has two equal answers within its first 21 tokens .*, and 1 m"):
        preview(rows_file([*pairs, late, late], **settings), 0, "run.toml")
    assert preview(rows_file([*pairs, late], **settings | {"data__sequence_length": 90}), 0, "run.toml").samples == 5
    whole, parts = ([{"role": "assistant", "content": text}] for text in ("4", [{"type": "text", "text": "4"}]))
    same = {"prompt": [{"role": "user", "content": "2"}], "chosen": whole, "rejected": parts}
    settings["data__sequence_length"] = 90
    dropped = rows_file([same, *pairs], **settings, data__overlong="drop")
    found, dataset = preview(dropped, 0, "run.toml"), open_dataset(dropped, tmp_path / "caches", "run.toml")
    assert (found.samples, found.skipped) == (4, 1)
    batch = dataset.batch(np.arange(4))
    assert all((batch.targets[2 * pair] != batch.targets[2 * pair + 1]).any() for pair in range(4))


def test_its_process_gives_the_same_without_torch(rows_file, run_python, tmp_path):
    config = rows_file([{"messages": TALK}] * 5, data__held_out=0.0)
    said, torch = run_python(f"""
        import sys
        from trainctl.trainer.data import preview
        sys.argv = ["preview", {str(tmp_path / "run.toml")!r}, "--node", "here"]
        assert preview.main() == 0
        print("torch" in sys.modules)
    """).splitlines()
    assert (msgspec.json.decode(said, type=DataStatistics), torch) == (preview(config, 3, "run.toml"), "False")


@pytest.mark.parametrize("kind", ["text", "samples"])
def test_each_kind_of_data_has_one(run_file, assets, kind):
    path = assets / ("text" if kind == "text" else "samples.jsonl")
    found = preview(run_file(data__path=str(path), data__kind=kind), 1, "run.toml")
    assert found.samples > 50 and found.tokens >= found.counted > 0 and len(found.shown[0].tokens) > 1


@pytest.mark.parametrize("kind", ["rows", "text"])
def test_texts_without_an_end_token_are_warned_of(rows_file, tmp_path, kind):
    text = tmp_path / "text.txt"
    text.write_text("import random", "utf-8")
    changes = {"data__path": str(text), "data__kind": kind, "data__sequence_length": 2} if kind == "text" else {}
    rows = [{"prompt": "a", "completion": "b"}] * 3
    assert preview(rows_file(rows, **changes), 0, "run.toml").warning == ""
    file, name = ("config.json", "eos_token_id") if kind == "text" else ("tokenizer_config.json", "eos_token")
    path = tmp_path / "model" / file
    fields = json.loads(path.read_text("utf-8"))
    del fields[name]
    path.write_text(json.dumps(fields), "utf-8")
    found = preview(rows_file(rows, **changes), 0, "run.toml")
    assert found.warning == without_end("text" if kind == "text" else "rows")
    assert name in found.warning


TALK = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "<think>hm</think>Yes."}]


def test_what_the_chat_template_does_is_said(rows_file, tmp_path):
    talks = [{"messages": TALK}, {"messages": [*TALK, *TALK]}, {"text": "no conversation"}]
    used = preview(rows_file(talks), 0, "run.toml").template
    opened = "<|im_start|>assistant\n"
    assert preview(rows_file(talks[2:] * 3), 0, "run.toml").template is None
    assert used == TemplateUse(2, before="<|im_start|>user\n", opens=opened, ends="<|im_end|>\n", changed=0)
    template = (TEMPLATES / "qwen3.jinja").read_text("utf-8") + "{{ strftime_now('%Y') }}"
    (tmp_path / "model" / "chat_template.jinja").write_text(template, "utf-8")
    found = preview(rows_file(talks), 0, "run.toml")
    assert found.template is not None and (found.template.changed, found.template.date) == (2, "2025-01-01")
    lines = [line.strip() for line in statistics_lines(found)]
    assert "leaves out or changes text in 2 of 2 conversations that were looked at" in lines


def test_bytes_are_put_together_to_characters(tmp_path):
    made = row_tokenizer(tmp_path, "bytes", "run.toml")
    tokens = [*"aé€".encode(), 257]
    assert list(made.pieces(tokens, [False, *[True] * 6])) == [
        ("a", False),
        ("é", True),
        ("€", True),
        ("<end>", True),
    ]
