"""The options of `trainctl-agent run` as a service has them: checked when it is installed, its paths absolute."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import typer

from trainctl.node_agent.services import option_variables
from trainctl.node_agent.services.model import Manager
from trainctl.protocol.config import addresses, cluster_file, names
from trainctl.protocol.config.names import NAME_PATTERN
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import paths

STALL_OPTION = "--exit-if-stalled"
STALL_SECONDS = 30
PATHS = ("state", "cluster")
_STATE = {"systemd": ".local/state/trainctl", "launchd": "Library/Application Support/trainctl"}


class Given(NamedTuple):
    """What `run` is called with."""

    node: str
    state: Path  # folder of all nodes' folders
    words: tuple[str, ...]  # all of its options


def of_run(context: Any, manager: Manager, home: Path | None) -> Given:
    """From what `install` was given beside its own options. `home`: of the user it runs as, if that isn't this one.

    Name and state folder are always written out: a host may be renamed, and a service knows little of a shell's
    environment. Raises InvalidInputError.
    """
    parsed, given = judged(context)
    command = parsed.command
    node = given["name"] or names.node_name()
    state = (given["state"] or (home / _STATE[manager] if home else paths.state_root())).absolute()
    words = ["--name", node, "--state", str(state)]
    for parameter in command.params:
        if parameter.name not in ("name", "state") and option_variables.is_given(parsed, parameter):
            words += _words(parameter, given[parameter.name])
    if manager == "launchd" and STALL_OPTION not in words:  # it has no watchdog
        words += [STALL_OPTION, str(STALL_SECONDS)]
    return Given(node, state, tuple(words))


def judged(context: Any) -> tuple[Any, dict[str, Any]]:
    """The options of `run` as typed or set by their variables, right on any machine: parsed, and as values. Raises
    InvalidInputError."""
    command = context.parent.command.commands["run"]
    try:
        parsed = command.make_context("run", list(context.args), parent=context.parent)
    except typer.TyperException as error:
        raise InvalidInputError("install", f"{error.format_message()} (see run --help)") from None
    # Whether what typer has parsed are paths already depends on its version.
    given = parsed.params | {name: Path(parsed.params[name]) for name in PATHS if parsed.params[name] is not None}
    with option_variables.naming_variables(parsed):
        _check(given["name"] or names.node_name(), given)
    return parsed, given


def _check(node: str, values: dict[str, Any]) -> None:
    if not re.fullmatch(NAME_PATTERN, node):
        raise InvalidInputError(
            "--name", f"{node!r} is not a node name: use lower-case letters, digits, '.', '_' and '-'"
        )
    if values["parent_watch"]:
        raise InvalidInputError("--leash", "a service has no standard input to watch; leave this option out")
    if values["detach"]:
        raise InvalidInputError("--detach", "a service is in a session of its own; leave this option out")
    for name in ("listen", "live"):
        if values[name] is not None:
            addresses.check_bind(values[name], keys=True)  # the agent looks for them when it starts
    if (path := values["cluster"]) is not None:
        cluster = cluster_file.read(path)
        if node not in cluster.nodes:
            raise InvalidInputError("--name", f"no node {node!r} in {path}")
        cluster_file.check_hooks(cluster, path)


def _words(parameter: Any, value: Any) -> list[str]:
    option = parameter.opts[0]
    if isinstance(value, bool):
        return [option] if value else parameter.secondary_opts[:1]
    items = value if isinstance(value, list | tuple) else [value]
    return [word for item in items for word in (option, str(item.absolute() if isinstance(item, Path) else item))]
