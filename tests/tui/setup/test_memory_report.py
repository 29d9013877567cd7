"""Beside an estimate, `check` says what an earlier run with the same settings measured."""

from pathlib import Path

import msgspec
import pytest
import tomli_w
from tests.tui.support import run_directory

from trainctl.protocol.config import run_file
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets
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
    assert found is not None
    assert found.plain["measured"] == {node: {"run": "a-1", "peak_bytes": max(peaks)}}
    assert f"measured memory on {node}: " in report_lines(found)[2] and report_lines(found)[2].endswith(" of a-1")
    other = msgspec.structs.replace(config, adapter=msgspec.structs.replace(config.adapter, kind="lora"))
    again = report_of(other, [node], "run.toml")
    assert again is not None and not again.measured and len(report_lines(again)) == len(report_lines(found)) - 1
