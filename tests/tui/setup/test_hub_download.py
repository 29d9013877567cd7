"""A person is asked before a model is downloaded; `hf` is a stand-in on PATH that fills the cache, fails or hangs."""

import os
from pathlib import Path

import pytest
from tests.tui.support.cli_calls import COMMAND, assert_one_line, call_process
from tests.tui.support.typist import Typist

from trainctl.trainer import demo_assets

MODEL = "org/tiny"
HF = """#!/bin/sh
echo "hf $*"
case "$HF_DOES" in
  fail) echo "no such model" >&2; exit 1;;
  hang) echo waiting; exec sleep 600;;
esac
mkdir -p "$HF_HUB_CACHE/models--org--tiny/snapshots" "$HF_HUB_CACHE/models--org--tiny/refs"
cp -r "$HF_MODEL" "$HF_HUB_CACHE/models--org--tiny/snapshots/abc"
printf abc > "$HF_HUB_CACHE/models--org--tiny/refs/main"
"""
LINE = f"{MODEL} isn't in the Hugging Face cache here; run: hf download {MODEL}"


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """The stand-in's folder on PATH, an empty cache, and a text and a run file beside it."""
    shape = demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64)
    demo_assets.make_model(tmp_path / "made", shape)
    (tmp_path / "text.txt").write_text("some text " * 200)
    (tmp_path / "asks.toml").write_text(
        f'[run]\nname = "a"\nsteps = 9\n[model]\npath = "{MODEL}"\n[data]\npath = "text.txt"\ntokenizer = "bytes"\n'
        "sequence_length = 64\n[batch]\nglobal = 2\nmicro = 2\n[optimizer]\nlearning_rate = 1e-3\n"
    )
    program = tmp_path / "bin" / "hf"
    program.parent.mkdir()
    program.write_text(HF)
    program.chmod(0o755)
    return {
        "PATH": f"{program.parent}:{os.environ['PATH']}", "HF_HUB_CACHE": str(tmp_path / "cache"),
        "HF_MODEL": str(tmp_path / "made"), "HF_DOES": "work", "TRAINCTL_CLUSTER": str(tmp_path / "cluster.toml"),
        "TRAINCTL_STATE": str(tmp_path / "state"),
    }  # fmt: skip


def test_init_downloads_what_its_model_lacks_and_the_run_file_names_the_id(tmp_path: Path, env: dict[str, str]) -> None:
    file = tmp_path / "run.toml"
    given = ["--data", tmp_path / "text.txt", "--adapter", "full", "--name", "a", "--steps", "9", "--batch", "2"]
    words = ["init", "--model", MODEL, *given, "--address", "tcp://127.0.0.1:7474", "--run-file", file]
    asked = Typist([*COMMAND, *map(str, words)], **env)
    asked.until(rf"Download {MODEL} with hf download\? \[y/N\]")
    asked.type("y\n")
    assert asked.ended() == 0, asked.said
    assert f"hf download {MODEL}" in asked.said
    assert f'path = "{MODEL}"' in file.read_text()


def test_who_declines_gets_the_line_and_a_script_is_not_asked(tmp_path: Path, env: dict[str, str]) -> None:
    asked = Typist([*COMMAND, "check", str(tmp_path / "asks.toml")], **env)
    asked.until("y/N")
    asked.type("\n")
    assert asked.ended() == 2
    assert LINE in asked.said
    assert_one_line(call_process("check", tmp_path / "asks.toml", **env), 2, LINE)
    assert not Path(env["HF_HUB_CACHE"]).exists()


@pytest.mark.parametrize(
    ("does", "status", "says"),
    [
        ("fail", 3, rf"no such model\s+trainctl: hf download {MODEL} failed \(exit status 1\)"),
        ("hang", 130, rf"trainctl: interrupted; to download the rest, run: hf download {MODEL}"),
    ],
)
def test_a_download_that_fails_or_is_interrupted_is_one_line(
    tmp_path: Path, env: dict[str, str], does: str, status: int, says: str
) -> None:
    asked = Typist([*COMMAND, "run", str(tmp_path / "asks.toml")], **{**env, "HF_DOES": does})
    asked.until("y/N")
    asked.type("y\n")
    if does == "hang":
        asked.until("waiting")
        asked.type("\x03")
    asked.until(says)
    assert asked.ended() == status
    assert "Traceback" not in asked.said
