"""The environment variables that set the options of `trainctl-agent run`: TRAINCTL_AGENT_NAME for --name.

For containers and other places that configure a program by its environment. The command line wins. An error names the
variable if that is where the value came from.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from trainctl.protocol.config.env_policy import AGENT_OPTIONS
from trainctl.protocol.errors import InvalidInputError


class SetByEnvironment(TyperCommand):
    """A command each of whose options, but hidden ones and --detach, can also be set by a variable."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        for option in self.params:
            if not getattr(option, "hidden", True) and option.name != "detach":  # which is of a shell alone
                option.envvar, option.show_envvar = variable(option), True  # type: ignore[attr-defined]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.param_hint = _source(ctx, error.param)
            raise

    def invoke(self, ctx: Any) -> Any:
        with naming_variables(ctx):
            return super().invoke(ctx)


def variable(option: Any) -> str:
    """The variable that sets an option."""
    name: str = option.opts[0].removeprefix("--").replace("-", "_").upper()
    return AGENT_OPTIONS + name


def is_given(context: Any, option: Any) -> bool:
    """Whether an option was set, by the command line or by its variable."""
    return _source_name(context, option) in ("COMMANDLINE", "ENVIRONMENT")


@contextlib.contextmanager
def naming_variables(context: Any) -> Iterator[None]:
    """Errors about an option, or its value, name the variable that set it. Raises InvalidInputError."""
    try:
        yield
    except InvalidInputError as error:
        for option in context.command.params:
            if _source_name(context, option) != "ENVIRONMENT":
                continue
            if error.where == option.opts[0]:
                raise InvalidInputError(variable(option), error.problem) from None
            if error.where == str(context.params[option.name]):
                raise InvalidInputError(f"{variable(option)}: {error.where}", error.problem) from None
        raise


def _source(context: Any, option: Any) -> str:
    """How a value was given, as an error names it."""
    return variable(option) if _source_name(context, option) == "ENVIRONMENT" else f"'{option.opts[0]}'"


def _source_name(context: Any, option: Any) -> str:
    source = context.get_parameter_source(option.name)
    return str(source.name) if source is not None else ""
