"""The example run file is right, and shows every setting there is."""

import re
import tomllib
from pathlib import Path

import msgspec

from trainctl.protocol.config import run_file, run_tables

EXAMPLE = Path(__file__).parents[3] / "examples" / "run.toml"
TABLES = {
    "run": run_tables.RunTable, "model": run_tables.ModelTable, "data": run_tables.DataTable,
    "batch": run_tables.BatchTable, "optimizer": run_tables.OptimizerTable, "checkpoint": run_tables.CheckpointTable,
    "evaluate": run_tables.EvaluateTable, "group": run_tables.GroupTable, "adapter": run_tables.AdapterTable,
}  # fmt: skip


def test_the_example_run_file_parses_and_leaves_nothing_out():
    config = run_file.read(EXAMPLE)
    assert config.run.steps == 60_000
    raw = tomllib.loads(EXAMPLE.read_text())
    for name, table in TABLES.items():
        assert set(raw[name]) == {field.encode_name for field in msgspec.structs.fields(table)}
    assert set(raw["nodes"]["studio"]) == {field.encode_name for field in msgspec.structs.fields(run_tables.NodeTable)}


def test_settings_said_to_stand_at_their_default_do():
    defaults = "seed|orphan_seconds|dtype|kind|tokenizer|beta1|beta2|epsilon|keep_last|keep_best|keep_every|at_end"
    defaults += "|compression|background"
    without = re.sub(rf"(?m)^({defaults}) .*$", "", EXAMPLE.read_text())
    shorter = run_file.parse(tomllib.loads(without))
    full = run_file.parse(tomllib.loads(EXAMPLE.read_text()))
    assert shorter == full
