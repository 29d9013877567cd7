"""The set of commands and options, frozen: a script somewhere depends on each of them."""

from typing import Any

import pytest
import typer
from tests.tui.support.cli_calls import assert_one_line, call

from trainctl.tui.cli.lazy_commands import CHANGING
from trainctl.tui.cli.main import app

FROZEN = {
    "": "--cluster --config --connect --help --install-completion --read-only --server-key --show-completion --verbose "
    "--version -h",
    "advise": "--cluster --connect --help --json --no-data --parameters --server-key --set -h RUN.toml",
    "alerts": "--cluster --connect --help --json --server-key -h",
    "attach": "--cluster --config --connect --help --read-only --server-key -h",
    "calibrate": "--alone --cluster --connect --help --json --node --server-key --set -h [RUN.toml]",
    "check": "--cluster --help --json --set -h RUN.toml",
    "cluster": "--help -h",
    "cluster add": "--address --cluster --extras --help --here --json --name --pip-args --python --ssh-config "
    "--system-site-packages -h USER@HOST",
    "cluster list": "--cluster --help --json -h",
    "cluster remove": "--cluster --help --json -h NODE",
    "cluster sync": "--cluster --dry-run --help --here --json --limit --node --python --set --ssh --ssh-config -h "
    "RUN.toml",
    "config": "--config --help --json -h",
    "data": "--help -h",
    "data bench": "--help --json --need --no-model --node --set -h RUN.toml",
    "data preview": "--help --json --node --samples --set -h -n RUN.toml",
    "demo": "--backend --cluster --folder --headless --help --json --keep --nodes --objective --scripted --speed "
    "--steps -h",
    "diagnose": "--cluster --connect --help --json --server-key --step -h RUN",
    "diff": "--help --json -h OTHER RUN",
    "discover": "--cluster --help --json --seconds -h",
    "doctor": "--cluster --connect --help --json --quiet --server-key -h -q [RUN.toml]",
    "events": "--cluster --connect --follow --help --json --last --run --server-key -f -h -n",
    "export": "--cluster --connect --format --help --output --server-key --what -h RUN",
    "export-model": "--best --dtype --help --json --output --step --to --verify -h RUN",
    "help": "--help -h [TOPIC]",
    "init": "--adapter --address --batch --cluster-file --data --help --json --model --name --objective --run-file "
    "--steps -h",
    "keys": "--help -h",
    "keys audit": "--cluster --connect --help --json --last --server-key -h -n",
    "keys authorize": "--help --json --role -h KEY NAME",
    "keys list": "--help --json -h",
    "keys new": "--help --json --name -h",
    "keys revoke": "--help --json -h NAME",
    "logs": "--all --cluster --connect --follow --grep --help --json --last --node --rank --run --server-key -f -h -n",
    "ls": "--cluster --connect --help --json --server-key -h",
    "mirror": "--cluster --connect --follow --help --offline --output --project --server-key --to -f -h RUN",
    "policies": "--cluster --connect --help --json --run --server-key -h",
    "profile": "--cluster --connect --help --json --last --node --out --server-key --steps --timeout -h RUN",
    "promote": "--cluster --connect --help --json --old-lead-is-off --run --server-key --timeout -h NODE",
    "quantize": "--group-size --help --json --output --to -h MODEL",
    "replay": "--help --speed -h RUN",
    "report": "--help --html --json --md -h RUN",
    "run": "--branch --cluster --connect --follow --help --json --node --old-lead-is-off --resume --server-key --set "
    "--timeout -f -h RUN.toml",
    "score": "--answers --best --cluster --connect --help --max-tokens --nodes --output --resume --seed --server-key "
    "--step --temperature --top-p -h FILE RUN",
    "selftest": "--help --json --list --only --out --seconds -h",
    "send": "--cluster --connect --help --id --if-plan --json --node --run --server-key --timeout --ttl --wait -h "
    "KEY=VALUE VERB",
    "simulate": "--help --json --output --parameters --seed --speed --steps --watch -h -o CLUSTER.toml RUN.toml",
    "status": "--cluster --connect --help --json --run --server-key -h",
    "watch": "--cluster --connect --help --json --run --server-key -h",
}


def names(command: Any) -> str:
    found = {"--help", "-h"}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            found.add(parameter.metavar)
        else:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return " ".join(sorted(found))


def commands() -> dict[str, Any]:
    """All of them by name, those of a group after the group's."""
    group: Any = typer.main.get_command(app)
    found = {"": group}
    for name, command in group.commands.items():
        found[name] = command
        found |= {f"{name} {inner}": below for inner, below in getattr(command, "commands", {}).items()}
    return found


def test_commands_and_options_are_the_frozen_ones() -> None:
    assert {name: names(command) for name, command in commands().items()} == FROZEN


def test_every_command_and_option_says_what_it_is() -> None:
    for name, command in commands().items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.help, f"{name} {parameter.name}"


READING = {
    "", "advise", "alerts", "attach", "check", "cluster", "cluster list", "config", "data", "data bench",
    "data preview", "diagnose", "diff", "discover", "doctor", "events", "export", "export-model", "help", "keys",
    "keys audit", "keys list", "logs", "ls", "mirror", "policies", "quantize", "replay", "report", "selftest",
    "simulate", "status", "watch",
}  # fmt: skip


def test_each_command_either_changes_something_or_is_known_to_read() -> None:
    assert set(FROZEN) == READING | CHANGING
    assert not READING & CHANGING


@pytest.mark.parametrize("words", ["send note text=x", "promote mbp", "keys revoke anna", "run run.toml"])
def test_read_only_refuses_what_changes_something(words: str) -> None:
    """At once: no agent is asked."""
    name = words if not words.startswith("keys") else "keys revoke"
    assert_one_line(call("--read-only", *words.split()), 2, "--read-only", name.split()[0])


def test_read_only_takes_what_reads(tmp_path: object) -> None:
    done = call("--read-only", "keys", "list", TRAINCTL_KEYS=str(tmp_path))
    assert "--read-only" not in done.stderr
