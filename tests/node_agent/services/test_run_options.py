"""The options of `trainctl-agent run` as its environment sets them."""

import sys
from typing import Any

import pytest
import typer

from trainctl.node_agent import cli
from trainctl.node_agent.services import run_options
from trainctl.protocol.config import env_policy
from trainctl.protocol.errors import InvalidInputError


def test_each_option_has_a_variable_that_no_trainer_or_demo_inherits() -> None:
    command: Any = typer.main.get_command(cli.app)
    variables = [option.envvar for option in command.commands["run"].params if option.envvar]
    assert {"TRAINCTL_AGENT_NAME", "TRAINCTL_AGENT_DRAIN_ON_TERM", "TRAINCTL_AGENT_EXIT_IF_STALLED"} <= {*variables}
    assert len({*variables}) == len(variables)
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
        ("GRACE", "soon", "Invalid value for TRAINCTL_AGENT_GRACE: 'soon' is not a valid float"),
        ("NAME", "A B", "TRAINCTL_AGENT_NAME: 'A B' is not a node name"),
        ("CLUSTER", "/none.toml", "TRAINCTL_AGENT_CLUSTER: /none.toml: no such cluster file"),
        ("SPOT_NOTICE_COMMAND", "/no/such", "TRAINCTL_AGENT_SPOT_NOTICE_COMMAND: "),
    ],
)
def test_a_bad_value_is_one_line_that_names_the_variable(name, value, says, monkeypatch, capsys):
    monkeypatch.setenv(f"TRAINCTL_AGENT_{name}", value)
    monkeypatch.setattr(sys, "argv", ["trainctl-agent", "run"])
    status = cli.main()
    out, err = capsys.readouterr()
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"trainctl-agent: {says}")


def test_a_service_keeps_what_variables_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINCTL_AGENT_GRACE", "60")
    monkeypatch.setenv("TRAINCTL_AGENT_DRAIN_ON_TERM", "1")
    program: Any = typer.main.get_command(cli.app)
    install = program.commands["install"].make_context(
        "install", ["--name", "studio"], parent=program.make_context("trainctl-agent", ["install"])
    )
    words = run_options.parse(install).words
    assert " ".join(words).endswith("--drain-on-term --grace 60.0")
