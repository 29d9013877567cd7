"""A person's machine before a run: downloads that are asked for, data that are measured, and its versions."""

import getpass
import os
import platform
import re
import socket
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value
from tests.tui.support import run_directory
from tests.tui.support.cli_calls import COMMAND, assert_one_line, call, call_process
from tests.tui.support.typist import Typist

from trainctl import protocol
from trainctl.protocol.batch.data_statistics import StepNeed
from trainctl.protocol.config import run_file
from trainctl.protocol.messages import DeviceTypes
from trainctl.protocol.messages.base import PROTOCOL_VERSION
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets
from trainctl.tui.setup import installed, memory_report
from trainctl.tui.setup.data_preview import known_need
from trainctl.tui.setup.memory_report import MemoryReport, report_lines, report_of

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


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A run file; and a run of it that this machine has recorded."""
    raw = with_value(with_value(with_value(good(), "model.path", "/model"), "data.path", "/data"), "batch.micro", 4)
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    directory = run_directory.make(tmp_path / "studio" / "runs" / "a-1")
    (directory / "run.toml").write_text(tomli_w.dumps(raw), "utf-8")
    return run_file.parse(raw)


def test_a_run_with_the_same_settings_says_what_training_takes(config: Any, tmp_path: Path) -> None:
    with RecordReader(tmp_path / "studio" / "runs" / "a-1") as record:
        totals, (first, *_) = record.totals(), record.steps(limit=1)[0]
        part = record.rank_steps(first.step)[0]
    tokens = totals.tokens_by_node[part.node] - part.tokens
    found = known_need(config, part.node, None)
    assert found is not None and (found.source, found.detail) == ("run", "a-1")
    assert found.tokens_per_second == pytest.approx(tokens / (totals.step_seconds - first.step_seconds))
    assert known_need(config, part.node, 7.0) == StepNeed(7.0, "given")


def test_runs_with_other_settings_or_on_other_nodes_say_nothing(config: Any, tmp_path: Path) -> None:
    with RecordReader(tmp_path / "studio" / "runs" / "a-1") as record:
        (node, *_) = record.totals().tokens_by_node
    other = msgspec.structs.replace(config, batch=msgspec.structs.replace(config.batch, micro=2))
    assert memory_report.newest_like(other, node) is None
    assert memory_report.newest_like(config, "elsewhere") is None
    (tmp_path / "studio" / "runs" / "a-1" / "run.toml").write_text("[run", "utf-8")
    assert memory_report.newest_like(config, node) is None


def test_it_has_the_versions_of_all_that_takes_part() -> None:
    done = call("--version", "--verbose")
    assert (done.returncode, done.stderr) == (0, "")
    found = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert found["trainctl"] == protocol.__version__
    assert found["protocol"] == str(PROTOCOL_VERSION)
    assert {name: found[name] for name in ("torch", "mlx")} == {name: version(name) for name in ("torch", "mlx")}
    assert_one_line(call("--verbose"), 2, "--verbose: applies only to --version")


def test_it_has_nothing_of_the_machine_s_names_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor of a kernel that was built on a named host."""
    for module, name in ((platform, "node"), (socket, "gethostname"), (getpass, "getuser")):
        monkeypatch.setattr(module, name, lambda: "anna-laptop")
    monkeypatch.setattr(platform, "release", lambda: "6.1.8-anna-laptop")
    text = installed.versions()
    assert not re.search(r"anna|/|@", text)
    assert "system Linux 6.1.8 " in text or platform.system() != "Linux"


@pytest.fixture
def raw(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run file whose model is there."""
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    demo_assets.make_model(tmp_path / "model", demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64))
    paths = with_value(with_value(good(), "model.path", str(tmp_path / "model")), "data.path", "/data")
    return with_value(paths, "batch.micro", 4)


def test_a_recorded_peak_stands_beside_the_estimate(tmp_path: Path, raw: dict[str, Any]) -> None:
    directory = run_directory.make(tmp_path / "studio" / "runs" / "a-1")
    with RecordReader(directory) as record:
        node = record.rank_steps(1)[0].node
        peaks = [part.values["memory_peak_bytes"] for part in record.parts_between(1, 999) if part.node == node]
    (directory / "run.toml").write_text(tomli_w.dumps(raw), "utf-8")
    config = run_file.parse(raw)
    found = report_of(config, [node], "run.toml")
    assert found.plain["measured"] == {node: {"run": "a-1", "peak_bytes": max(peaks)}}
    assert f"measured memory on {node}: " in report_lines(found)[2] and report_lines(found)[2].endswith(" of a-1")
    other = msgspec.structs.replace(config, adapter=msgspec.structs.replace(config.adapter, kind="lora"))
    again = report_of(other, [node], "run.toml")
    assert again is not None and not again.measured and len(report_lines(again)) == len(report_lines(found)) - 1


def test_a_card_of_this_machine_without_the_run_files_type_is_warned_of(
    raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_report, "read_devices", lambda: (DeviceTypes("torch", "cuda:0", ("float16",)),))

    def report(dtype: str) -> MemoryReport:
        config = run_file.parse(with_value(with_value(raw, "model.dtype", dtype), "nodes", {"turing": {}, "far": {}}))
        found = report_of(config, ["turing", "far"], "run.toml", here=["turing"])
        assert found is not None
        return found

    found = report("bfloat16")
    assert [line for line in found.warnings if "bfloat16" in line] == [
        'model.dtype = "bfloat16": cuda:0 of turing computes it without hardware for it, slowly; "auto" takes the best '
        "type that the devices of all ranks have"
    ]
    auto, half, whole = map(report, ("auto", "float16", "float32"))
    assert auto.nodes == half.nodes != whole.nodes and not auto.warnings
