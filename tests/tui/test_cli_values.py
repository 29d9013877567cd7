"""Values of the command line come out as the parser library's own validator has them, and plain ones without it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperArgument, TyperOption

from trainctl.tui.cli import app
from trainctl.tui.cli_values import spare_validator

VALUES: tuple[Any, ...] = (
    None, "", "x", "5", "-1", "0", "007", "1_000", " 5", "5.0", "1e3", "nan", "9" * 20, "applied", "APPLIED", "torch",
    "csv", "run.toml", "/", "/dev/null", ["a=1", "b"], (), ["a"], 60.0, 100, Path("run.toml"), "٥",
)  # fmt: skip


def parameters(command: Any, name: str = "trainctl") -> Iterator[Any]:
    """All of a command and of those below it that the library coerces."""
    for parameter in command.params:
        if isinstance(parameter, TyperOption | TyperArgument):
            yield pytest.param(parameter, command, id=f"{name} {parameter.name}")
    for below, inner in getattr(command, "commands", {}).items():
        yield from parameters(inner, f"{name} {below}")


def outcome(coerce: Any, value: Any, parameter: Any, command: Any) -> Any:
    try:
        found = coerce(value, param=parameter, ctx=typer.Context(command))
    except (typer.BadParameter, AssertionError) as error:
        return type(error), str(error)
    return type(found) if found != found else (type(found), found)


def test_every_value_is_as_the_library_has_it() -> None:
    spare_validator()
    seen = set()
    for case in parameters(typer.main.get_command(app)):
        parameter, command = case.values
        annotation, info = parameter.type_descriptor.annotation, parameter.type_descriptor.parameter_info
        key = (str(annotation), info.min, info.max, info.file_okay, info.dir_okay, parameter.default, parameter.nargs)
        if str(key) in seen:
            continue
        seen.add(str(key))
        late = parameter.get_runtime_param()
        for value in VALUES:
            if isinstance(value, list | tuple) and parameter.nargs == 1 and not parameter.multiple:
                continue  # a parser gives no list to what takes one value
            if isinstance(value, str) and (parameter.nargs == -1 or parameter.multiple):
                continue  # nor text to what takes several
            own = outcome(late.own.coerce, value, parameter, command)
            assert outcome(late.coerce, value, parameter, command) == own, f"{case.id}: {value!r}"
    assert len(seen) > 15
