"""A TOML file read and checked against a type, what is wrong with it named by file and field."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainctl.protocol import problems
from trainctl.protocol.errors import InvalidInputError

T = TypeVar("T")


def read(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file that is `what`, such as a run file. Raises InvalidInputError naming it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(str(path), f"no such {what}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidInputError(str(path), f"not a readable TOML file: {error}") from None


def checked(raw: dict[str, Any], kind: type[T], where: str) -> T:
    """The tables as a `kind`. Raises InvalidInputError naming `where` and the field."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        field, problem = problems.split(str(error))
        raise InvalidInputError(f"{where}: {field}" if field else where, problem) from None
