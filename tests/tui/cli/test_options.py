"""Which commands `--read-only` refuses: all that change something, and none that only reads."""

from pathlib import Path
from typing import Any

import pytest
import typer
from tests.tui.support.cli_calls import assert_one_line, call

from trainctl.tui.cli.main import CHANGING, app

READING = {
    "advise", "alerts", "attach", "check", "cluster", "cluster list", "config", "data", "data bench", "data preview",
    "diagnose", "diff", "discover", "doctor", "events", "export", "export-model", "help", "keys", "keys audit",
    "keys list", "logs", "ls", "mirror", "policies", "quantize", "replay", "report", "runs", "simulate",
    "status", "watch",
}  # fmt: skip


def test_each_command_either_changes_something_or_is_known_to_read() -> None:
    group: Any = typer.main.get_command(app)
    names = set()
    for name, command in group.commands.items():
        names |= {name, *(f"{name} {inner}" for inner in getattr(command, "commands", {}))}
    assert names == READING | CHANGING
    assert not READING & CHANGING


@pytest.mark.parametrize("words", ["send note text=x", "promote mbp", "keys revoke anna", "run run.toml"])
def test_read_only_refuses_what_changes_something(words: str) -> None:
    """It asks no agent first."""
    name = words if not words.startswith("keys") else "keys revoke"
    assert_one_line(call("--read-only", *words.split()), 2, "--read-only", name.split()[0])


def test_read_only_takes_what_reads(tmp_path: Path) -> None:
    assert "--read-only" not in call("--read-only", "keys", "list", TRAINCTL_KEYS=str(tmp_path)).stderr
