"""Probable mistakes of a run file: a text with the usual range, and a change that brings the setting into it."""

from typing import Any

import pytest
from tests.protocol.support.run_files import good

from trainctl.protocol.config import run_file
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.config.usual_settings import DataSize, unusual_settings

PLENTY = DataSize(100_000, 1_000)


def config(**tables: Any) -> RunFile:
    usual = {"run": {"name": "a", "steps": 1000}, "batch": {"global": 16, "micro": 1}, "evaluate": {"every_steps": 10}}
    optimizer = {"learning_rate": 1e-4, **tables.pop("optimizer", {})}
    return run_file.parse(good() | usual | {"optimizer": optimizer} | tables)


@pytest.mark.parametrize(
    ("tables", "data", "setting"),
    [
        ({"batch": {"global": 8192, "micro": 1}, "run": {"name": "a", "steps": 9}}, DataSize(9000, 90), "batch.global"),
        ({"optimizer": {"learning_rate": 5}}, PLENTY, "optimizer.learning_rate"),
        ({"optimizer": {"learning_rate": 5}, "adapter": {"kind": "lora"}}, None, "optimizer.learning_rate"),
        ({"optimizer": {"learning_rate": 1e-12}}, None, "optimizer.learning_rate"),
        ({}, DataSize(198, 20), "run.steps"),
        ({"run": {"name": "a", "steps": 100}}, DataSize(164, 1), "data.held_out"),
    ],
)
def test_a_probable_mistake_is_named_with_its_source_and_the_change_ends_it(
    tables: dict[str, Any], data: DataSize | None, setting: str
) -> None:
    (found,) = unusual_settings(config(**tables), data)
    assert found.setting == setting and found.text.startswith(setting)
    assert any(year in found.text for year in map(str, range(2009, 2026))), "a public source"
    key, value = found.change.split("=")
    table, name = key.split(".")
    raw = run_file.to_dict(config(**tables))
    raw[table] = {**raw.get(table, {}), name: float(value) if "." in value or "e" in value else int(value)}
    if key == "run.epochs":
        del raw["run"]["steps"]
    whole = data.epoch + (data.held_out or 0) if data is not None else 0
    after = DataSize(whole - whole // 10, whole // 10) if key == "data.held_out" else data
    assert setting not in [one.setting for one in unusual_settings(run_file.parse(raw), after)]


@pytest.mark.parametrize("data", [None, PLENTY])
def test_usual_settings_are_not_mentioned(data: DataSize | None) -> None:
    assert unusual_settings(config(), data) == ()
