"""The example run file is right, and shows every setting there is."""

import re
import tomllib
from pathlib import Path

import msgspec

from trainctl.protocol import runfile

EXAMPLE = Path(__file__).parents[2] / "examples" / "run.toml"
TABLES = {
    "run": runfile.RunTable, "model": runfile.ModelTable, "data": runfile.DataTable, "batch": runfile.BatchTable,
    "optimizer": runfile.OptimizerTable, "checkpoint": runfile.CheckpointTable, "evaluate": runfile.EvaluateTable,
    "group": runfile.GroupTable,
}  # fmt: skip


def test_the_example_run_file_parses_and_leaves_nothing_out():
    config = runfile.read(EXAMPLE)
    assert config.run.steps == 60_000
    raw = tomllib.loads(EXAMPLE.read_text())
    for name, table in TABLES.items():
        assert set(raw[name]) == {field.encode_name for field in msgspec.structs.fields(table)}
    assert set(raw["nodes"]["studio"]) == {field.encode_name for field in msgspec.structs.fields(runfile.NodeTable)}


def test_settings_said_to_stand_at_their_default_do():
    without = re.sub(r"(?m)^(seed|orphan_seconds|dtype|kind|tokenizer|beta1|beta2|epsilon|keep_last|at_end) .*$", "",
                     EXAMPLE.read_text())  # fmt: skip
    shorter = runfile.parse(tomllib.loads(without))
    full = runfile.parse(tomllib.loads(EXAMPLE.read_text()))
    assert shorter == full
