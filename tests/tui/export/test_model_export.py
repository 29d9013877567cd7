"""`trainctl model export`: the command, and what it says when the trainer cannot do what was asked."""

import json
from pathlib import Path

import pytest
from tests.trainer.support.chat_model import make_chat_model
from tests.trainer.support.trained_run import TrainedRun
from tests.tui.support.cli_calls import assert_one_line, call, call_json

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
