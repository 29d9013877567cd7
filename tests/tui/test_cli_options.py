"""The set of commands and options, frozen: a script somewhere depends on each of them."""

from typing import Any

import typer

from trainctl.tui.cli import app

FROZEN = {
    "": "--connect --help --install-completion --read-only --show-completion --version -h",
    "attach": "--connect --help --read-only -h",
    "check": "--help --json --set -h RUN.toml",
    "demo": "--backend --folder --headless --help --json --keep --steps -h",
    "events": "--connect --follow --help --json --last --run -f -h -n",
    "logs": "--connect --follow --help --json --last --rank --run -f -h -n",
    "ls": "--connect --help --json -h",
    "run": "--connect --follow --help --json --resume --set --timeout -f -h RUN.toml",
    "send": "--connect --help --id --if-plan --json --node --run --timeout --ttl --wait -h KEY=VALUE VERB",
    "status": "--connect --help --json --run -h",
    "watch": "--connect --help --json --run -h",
}


def names(command: Any) -> str:
    found = {"--help", "-h"}
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            found.add(parameter.metavar)
        else:
            found |= {*parameter.opts, *parameter.secondary_opts}
    return " ".join(sorted(found))


def test_commands_and_options_are_the_frozen_ones() -> None:
    group: Any = typer.main.get_command(app)
    found = {"": names(group), **{name: names(command) for name, command in group.commands.items()}}
    assert found == FROZEN


def test_every_command_and_option_says_what_it_is() -> None:
    group: Any = typer.main.get_command(app)
    for name, command in group.commands.items():
        assert command.help, name
        for parameter in command.params:
            assert parameter.param_type_name == "argument" or parameter.help, f"{name} {parameter.name}"
