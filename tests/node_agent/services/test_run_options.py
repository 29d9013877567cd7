"""The options of `trainctl-agent run` as its environment sets them."""

import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from trainctl.node_agent import cli
from trainctl.protocol.config import env_policy
from trainctl.protocol.errors import InvalidInputError


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without runs of other nodes' names, of which the command would speak in a second line."""
    monkeypatch.setenv("TRAINCTL_STATE", str(tmp_path))


def test_no_trainer_or_demo_inherits_the_options_of_its_agent() -> None:
    command: Any = typer.main.get_command(cli.app)
    variables = [f"{env_policy.AGENT_OPTIONS}{option.name.upper()}" for option in command.commands["run"].params]
    kept = env_policy.without_agent_options({**dict.fromkeys(variables, "x"), "TRAINCTL_STATE": "/s", "HOME": "/h"})
    assert kept == {"TRAINCTL_STATE": "/s", "HOME": "/h"}
    for name in variables:
        with pytest.raises(InvalidInputError, match="reserved"):
            env_policy.check({name: "x"}, "run.toml: nodes.a.env")


def test_the_command_line_wins_and_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_AGENT_NAME", "studio")
    monkeypatch.setenv("TRAINCTL_AGENT_GRACE", "60")
    monkeypatch.setenv("TRAINCTL_AGENT_DRAIN_ON_TERM", "true")
    monkeypatch.setenv("TRAINCTL_AGENT_LISTEN", "")
    program: Any = typer.main.get_command(cli.app)
    given = program.commands["run"].make_context("run", ["--grace", "20"]).params
    assert (given["name"], given["grace"], given["drain_on_term"], given["listen"]) == ("studio", 20.0, True, None)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("GRACE", "soon", "Invalid value for '--grace': 'soon' is not a valid float"),
        ("NAME", "A B", "--name: 'A B' is not a node name"),
        ("CLUSTER", "/none.toml", "/none.toml: no such cluster file"),
        ("SPOT_NOTICE_COMMAND", "/no/such", "--spot-notice-command: "),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_option(name, value, says, monkeypatch, capsys):
    monkeypatch.setenv(f"TRAINCTL_AGENT_{name}", value)
    monkeypatch.setattr(sys, "argv", ["trainctl-agent", "run"])
    status = cli.main()
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"trainctl-agent: {says}")
