"""Models exported and rows scored from the command line: what is checked before anyone is asked."""

import json
from pathlib import Path

import pytest
from tests.trainer.support.chat_model import make_chat_model, write_rows
from tests.trainer.support.trained_run import TrainedRun
from tests.tui.support.cli_calls import assert_one_line, call, call_json

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import AnswerOptions
from trainctl.tui.export.row_scores import answer_options, read_file

LORA = {"kind": "lora", "rank": 4, "alpha": 16.0}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run in a node's folder, whose root is two above."""
    root = tmp_path_factory.mktemp("state")
    model = make_chat_model(tmp_path_factory.mktemp("base") / "model")
    return TrainedRun(root / "here" / "runs" / "small-1", model, "torch", LORA, steps=2, saved=(2,)).paths.directory


def test_a_run_is_exported_by_its_id(run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    done = call("model", "export", run.name, "--to", "fused", "--output", folder, TRAINCTL_STATE=str(run.parents[2]))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith(f"{folder}: fused of step 2, float32, ")
    assert f"    python convert_hf_to_gguf.py '{folder}' --outfile 'a folder.gguf'" in lines
    assert json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == "llama"


def test_json_is_one_object_and_the_folder_has_a_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    made = call_json("model", "export", run, "--to", "peft")
    assert made["folder"] == str(tmp_path / "small-1-step-2-peft")
    assert made["difference"] <= made["tolerance"] == 1e-5
    refused = call_json("model", "export", run, "--to", "peft", status=2)
    assert refused["error"]["text"].startswith(f"{made['folder']}: already exists")


def test_what_cannot_be_done_is_one_line(run: Path, tmp_path: Path) -> None:
    output = ("--output", tmp_path / "out")
    assert_one_line(
        call("model", "export", run, "--to", "peft", "--step", "1", *output), 2, "--step", "there is one of 2"
    )
    assert_one_line(call("model", "export", run, "--to", "peft", "--best", "--step", "2", *output), 2, "--best")
    assert_one_line(call("model", "export", tmp_path, "--to", "peft", *output), 2, "not a run directory")
    assert_one_line(call("model", "export", run, "--to", "gguf", *output), 2, "--to")
    file = tmp_path / "file"
    file.touch()
    assert_one_line(call("model", "export", run, "--to", "peft", "--output", file / "out"), 1, "file")
    assert [*tmp_path.iterdir()] == [file]


def test_options_of_answers() -> None:
    assert answer_options({"seed": None}, answers=False) is None
    assert answer_options({"seed": None}, answers=True) == AnswerOptions()
    given = {"max_tokens": 5, "temperature": 0.5, "top_p": None, "seed": 3, "use_generation_config": True}
    assert answer_options(given, answers=True) == AnswerOptions(5, 0.5, 1.0, 3, use_generation_config=True)
    for name, value, says in (("max_tokens", 5000, "--max-tokens: must be .* at most 1024"), ("top_p", 0, "--top-p: ")):
        with pytest.raises(InvalidInputError, match=says):
            answer_options({name: value}, answers=True)
    with pytest.raises(InvalidInputError, match="--seed: needs --answers"):
        answer_options({"seed": 0}, answers=False)


def test_rows_are_checked_for_their_use(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "completion": "b"}, {"prompt": "a"}])
    assert read_file(Path(rows), prompts=True).rows == 2
    with pytest.raises(InvalidInputError, match="line 2"):
        read_file(Path(rows))
    texts = write_rows(tmp_path / "texts.jsonl", [{"text": "a"}])
    with pytest.raises(InvalidInputError, match=r"line 1.*needs"):
        read_file(Path(texts), prompts=True)
    asked = write_rows(tmp_path / "asked.jsonl", [{"messages": [{"role": "user", "content": "a"}]}])
    with pytest.raises(InvalidInputError, match="line 1: no assistant turn to score; use --answers"):
        read_file(Path(asked))
    with pytest.raises(InvalidInputError, match="no such file"):
        read_file(tmp_path / "none.jsonl")


def test_a_byte_order_mark_is_no_part_of_the_first_row(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n\n{"text": "\ufeffb"}', "utf-8-sig")
    assert [*read_file(tmp_path / "rows.jsonl").lines()] == [b'{"text": "a"}\n', '{"text": "\ufeffb"}\n'.encode()]
