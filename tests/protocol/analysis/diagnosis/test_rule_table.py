"""The table of rules: its order, and remedies that are commands of this program."""

import importlib
import itertools
from pathlib import Path
from typing import Any

import pytest
import tomli_w
import typer
from tests.protocol.support.run_files import good

from trainctl.protocol.analysis.diagnosis.rules.table import RULES
from trainctl.protocol.config import run_file
from trainctl.protocol.messages import verbs
from trainctl.tui.cli.main import FILES

VALUES: dict[str, Any] = {
    "node": "studio", "other": "mbp", "rank": 1, "run": "run-20261126-110000-abcd", "checkpoint": 100, "back": 100,
    "smaller": 4, "micro": 8, "double": 16, "prefetch": 4, "threads": 2, "workers": 2, "less_rank": 8, "shorter": 256,
    "half_rate": "5e-05", "norm": "2.5", "every": 500, "batch": 96, "alone": "1.2 s",
    "clip": "0.5", "warmup": "warmup_steps=3", "nodes": "studio,mbp",
}  # fmt: skip
"""One value of each name that a remedy may need."""
COMMANDS = sorted({rung.command.format_map(VALUES) for rule in RULES for rung in rule.ladder if rung.command})
RUN = good() | {
    "model": {"path": "model", "dtype": "float16", "gradient_checkpointing": "alternate"},
    "data": {"path": "data.jsonl", "kind": "rows"},
    "checkpoint": {"background": False},
    "adapter": {"kind": "lora"},
    "nodes": {"studio": {}, "mbp": {}},
}


def test_each_cause_is_there_once_and_explains_later_ones() -> None:
    order = [rule.cause for rule in RULES]
    assert len(set(order)) == len(order)
    for at, rule in enumerate(RULES):
        assert rule.ladder and {*rule.explains} <= {*order}, rule.cause
        assert all(order.index(cause) > at for cause in rule.explains if cause != "throttled"), rule.cause


@pytest.mark.parametrize("command", COMMANDS)
def test_a_remedy_is_a_command_of_this_program(command: str, tmp_path: Path) -> None:
    program, name, *words = command.split()
    assert program == "trainctl"
    group = typer.main.get_group(importlib.import_module(f"trainctl.tui.cli.{FILES[name]}").app)
    entry: Any = group.commands[name]
    with entry.make_context(name, [*words]) as context:
        assert not context.args or name in ("send", "data")
    if name == "send":
        node = words[words.index("--node") + 1] if "--node" in words else None
        pairs = dict(word.split("=", 1) for word in words if "=" in word)
        verbs.check(words[0], verbs.parse_args(words[0], pairs), node)
    if "--set" in words:
        path = tmp_path / "run.toml"
        path.write_text(tomli_w.dumps(RUN), "utf-8")
        pairs = dict(word.split("=", 1) for flag, word in itertools.pairwise(words) if flag == "--set")
        changed = run_file.read(path, pairs)
        assert changed != run_file.read(path) and changed.nodes.keys() == RUN["nodes"].keys()
        path.write_text(tomli_w.dumps(RUN | {"nodes": {}}), "utf-8")
        assert {*run_file.read(path, pairs).nodes} in ({*RUN["nodes"]}, set())
