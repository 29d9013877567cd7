"""The options of `trainctl-agent run`: set by the command line or by variables, and as a service passes them.

TRAINCTL_AGENT_NAME sets --name, for containers and other places that configure a program by its environment. The
command line wins. An error names the variable if that is where the value came from.
"""

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from trainctl.protocol.config import addresses, cluster_file, names
from trainctl.protocol.config.env_policy import AGENT_OPTIONS
from trainctl.protocol.config.names import NAME_PATTERN
from trainctl.protocol.errors import InvalidInputError

PATHS = ("state", "cluster")


class SetByEnvironment(TyperCommand):
    """A command each of whose options, but hidden ones and --detach, can also be set by a variable."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for option in self.params:
            if not getattr(option, "hidden", True) and option.name != "detach":  # which is of a shell alone
                option.envvar, option.show_envvar = _variable(option), True  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            option: Any = error.param
            error.param_hint = _variable(option) if _source(ctx, option) == "ENVIRONMENT" else f"'{option.opts[0]}'"
            raise

    def invoke(self, ctx: Any) -> Any:
        with _naming_variables(ctx):
            return super().invoke(ctx)


@dataclass(frozen=True)
class RunOptions:
    """The options of `run` that `install` was called with."""

    node: str
    state: Path | None
    words: tuple[str, ...]  # the other ones that were set, for a command line, with absolute paths


def parse(install: Any) -> RunOptions:
    """Return the options of `run` from the context of `install`, checked. Raises InvalidInputError."""
    command = install.parent.command.commands["run"]
    try:
        context = command.make_context("run", list(install.args), parent=install.parent)
    except typer.TyperException as error:
        raise InvalidInputError("install", f"{error.format_message()} (see run --help)") from None
    # Whether what typer has parsed are paths already depends on its version.
    paths = {name: Path(context.params[name]) for name in PATHS if context.params[name] is not None}
    values = {**context.params, **paths, "name": context.params["name"] or names.node_name()}
    with _naming_variables(context):
        _check(values)
    words: list[str] = []
    for option in command.params:
        if option.name not in ("name", "state") and _source(context, option) in ("COMMANDLINE", "ENVIRONMENT"):
            words += _option_words(option, values[option.name])
    return RunOptions(values["name"], values["state"], tuple(words))


def _option_words(option: Any, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [option.opts[0]] if value else option.secondary_opts[:1]
    items = value if isinstance(value, list | tuple) else [value]
    texts = (str(item.absolute() if isinstance(item, Path) else item) for item in items)
    return [word for text in texts for word in (option.opts[0], text)]


def _check(values: dict[str, Any]) -> None:
    node, file = values["name"], values["cluster"]
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
    if file is not None:
        cluster = cluster_file.read(file)
        if node not in cluster.nodes:
            raise InvalidInputError("--name", f"no node {node!r} in {file}")
        cluster_file.check_hooks(cluster, file)


@contextlib.contextmanager
def _naming_variables(context: Any) -> Iterator[None]:
    """Have errors about an option, or its value, name the variable that set it. Raises InvalidInputError."""
    try:
        yield
    except InvalidInputError as error:
        for option in context.command.params:
            if _source(context, option) != "ENVIRONMENT":
                continue
            if error.where == option.opts[0]:
                raise InvalidInputError(_variable(option), error.problem) from None
            if error.where == str(context.params[option.name]):
                raise InvalidInputError(f"{_variable(option)}: {error.where}", error.problem) from None
        raise


def _variable(option: Any) -> str:
    name: str = option.opts[0].removeprefix("--").replace("-", "_").upper()
    return AGENT_OPTIONS + name


def _source(context: Any, option: Any) -> str:
    source = context.get_parameter_source(option.name)
    return str(source.name) if source is not None else ""
