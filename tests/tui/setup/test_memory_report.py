"""Beside an estimate, `check` says what an earlier run with the same settings measured."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from tests.protocol.support.run_files import good, with_value
from tests.tui.support import run_directory

from trainctl.protocol.config import run_file
from trainctl.protocol.messages import DeviceTypes
from trainctl.protocol.record.reader import RecordReader
from trainctl.trainer import demo_assets
from trainctl.tui.setup import memory_report
from trainctl.tui.setup.memory_report import MemoryReport, report_lines, report_of


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
