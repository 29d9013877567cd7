"""Which commands `--read-only` refuses: all that change something, and none that only reads."""

from pathlib import Path
from typing import Any

import pytest
import typer
from tests.tui.support.cli_calls import assert_one_line, call

from trainctl.tui.cli.main import CHANGING, FILES, RENAMED, app

READING = {
    *(
        "advise",
        "alerts",
        "attach",
        "check",
        "config",
        "diagnose",
        "diff",
        "doctor",
        "events",
        "export",
        "help",
        "logs",
    ),
    *("ls", "mirror", "policies", "replay", "report", "schema", "simulate", "status", "watch"),
    *("cluster", "cluster discover", "cluster list", "data", "data bench", "data preview", "keys", "keys audit"),
    *("keys list", "model", "model export", "model quantize", "runs"),
}


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


def test_help_lists_all_commands_by_heading_and_says_more_if_asked() -> None:
    brief, whole = call("--help").stdout, call("--help", "--all").stdout
    listed = brief.split("Commands", 1)[1].split("\n\n")[0].splitlines()[1:]
    assert len(listed) <= 12
    assert {*FILES, "attach"} <= {word for row in listed for word in row.split()}
    assert all(any(row.split()[:1] == [name] for row in whole.splitlines()) for name in (*FILES, "attach"))


@pytest.mark.parametrize("name", RENAMED)
def test_an_old_name_works_as_the_new_one_and_names_it(name: str, tmp_path: Path) -> None:
    rest = {"discover": ["--cluster", tmp_path / "none.toml"]}.get(name, [tmp_path / "none", "--to", "mlx-4bit"])
    old, new = call(name, *rest, "--json"), call(*RENAMED[name].split(), *rest, "--json")
    assert (old.returncode, old.stdout) == (new.returncode, new.stdout) and new.returncode
    assert f"trainctl {RENAMED[name]}" in old.stderr.splitlines()[0] and "is now" not in new.stderr
