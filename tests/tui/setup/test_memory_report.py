"""Beside an estimate, `check` says what an earlier run with the same settings measured."""

from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.tui.support import run_directory

from trainctl.protocol.config import run_file
from trainctl.protocol.messages import DeviceTypes
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets
from trainctl.tui.setup import memory_report
from trainctl.tui.setup.memory_report import report_lines, report_of


def test_a_recorded_peak_stands_beside_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    demo_assets.make_model(tmp_path / "model", demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64))
    directory = run_directory.make(tmp_path / "studio" / "runs" / "a-1")
    with RecordReader(directory) as record:
        parts = record.rank_steps(1)
        node = parts[0].node
        peaks = [part.values["memory_peak_bytes"] for part in record.parts_between(1, 999) if part.node == node]
    raw = {
        "run": {"name": "a", "steps": 9}, "model": {"path": str(tmp_path / "model")}, "data": {"path": "/data"},
        "batch": {"global": 24, "micro": 4}, "optimizer": {"learning_rate": 1e-3},
    }  # fmt: skip
    (directory / "run.toml").write_text(tomli_w.dumps(raw), "utf-8")
    config = run_file.parse(raw)
    found = report_of(config, [node], "run.toml")
    assert found.plain["measured"] == {node: {"run": "a-1", "peak_bytes": max(peaks)}}
    assert f"measured memory on {node}: " in report_lines(found)[2] and report_lines(found)[2].endswith(" of a-1")
    other = msgspec.structs.replace(config, adapter=msgspec.structs.replace(config.adapter, kind="lora"))
    again = report_of(other, [node], "run.toml")
    assert again is not None and not again.measured and len(report_lines(again)) == len(report_lines(found)) - 1


def test_a_card_of_this_machine_without_the_run_files_type_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))
    monkeypatch.setattr(memory_report, "read_devices", lambda: (DeviceTypes("torch", "cuda:0", ("float16",)),))
    demo_assets.make_model(tmp_path / "model", demo_assets.llama_config(hidden=32, layers=1, heads=2, intermediate=64))
    config = run_file.parse({
        "run": {"name": "a", "steps": 9}, "model": {"path": str(tmp_path / "model"), "dtype": "bfloat16"},
        "data": {"path": "/data"}, "batch": {"global": 24, "micro": 4}, "optimizer": {"learning_rate": 1e-3},
        "nodes": {"turing": {}, "far": {}},
    })  # fmt: skip
    found = report_of(config, ["turing", "far"], "run.toml", here=["turing"])
    assert [line for line in found.warnings if "bfloat16" in line] == [
        'model.dtype = "bfloat16": cuda:0 of turing computes it without hardware for it, slowly; "auto" takes the best '
        "type that the devices of all ranks have"
    ]
    auto, half, whole = (
        report_of(
            msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, dtype=dtype)),
            ["turing"], "run.toml", here=["turing"],
        )
        for dtype in ("auto", "float16", "float32")
    )  # fmt: skip
    assert auto.nodes == half.nodes != whole.nodes and not auto.warnings
