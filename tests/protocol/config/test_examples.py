"""The example run file is right, and shows every setting there is."""

import re
import tomllib
from pathlib import Path

import msgspec

from trainctl.protocol.config import run_file, run_tables

EXAMPLE = Path(__file__).parents[3] / "examples" / "run.toml"
SHOWN = ("run", "model", "data", "batch", "optimizer", "checkpoint", "evaluate", "group", "adapter")


def test_the_example_run_file_parses_and_leaves_nothing_out():
    assert run_file.read(EXAMPLE).run.steps == 60_000
    raw = tomllib.loads(EXAMPLE.read_text())
    tables = {field.name: field.type for field in msgspec.structs.fields(run_tables.RunFile)}
    for shown, table in [(raw[name], tables[name]) for name in SHOWN] + [
        (raw["nodes"]["studio"], run_tables.NodeTable)
    ]:
        assert set(shown) == {field.encode_name for field in msgspec.structs.fields(table)}


def test_settings_said_to_stand_at_their_default_do():
    defaults = "seed|orphan_seconds|dtype|kind|tokenizer|beta1|beta2|epsilon|keep_last|keep_best|keep_every|at_end"
    defaults += "|compression|background"
    without = re.sub(rf"(?m)^({defaults}) .*$", "", EXAMPLE.read_text())
    shorter = run_file.parse(tomllib.loads(without))
    full = run_file.parse(tomllib.loads(EXAMPLE.read_text()))
    assert shorter == full
