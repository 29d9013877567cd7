"""A TOML file read and checked against a type, what is wrong with it named by file and field."""

import tomllib
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainctl.protocol.config import validation_errors
from trainctl.protocol.errors import Collected, InvalidInputError

T = TypeVar("T")


def read(path: Path, what: str) -> dict[str, Any]:
    """The tables of a file that is `what`, such as a run file. Raises InvalidInputError naming it."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InvalidInputError(str(path), f"no such {what}") from None
    except OSError as error:
        raise InvalidInputError(str(path), f"not a readable TOML file: {error.strerror or error}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        other = "; trainctl init writes a run file" if path.suffix in (".yaml", ".yml", ".json") else ""
        raise InvalidInputError(str(path), f"not a readable TOML file: {error}{other}") from None
    except RecursionError:
        raise InvalidInputError(str(path), "not a readable TOML file: nested too deeply") from None


def checked(raw: dict[str, Any], kind: type[T], where: str) -> T:
    """The tables as a `kind`. Raises InvalidInputError naming `where` and the field; with several, all of them."""
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        wrong = Collected()
        for field, problem in [*validation_errors.found(raw, kind)] or [validation_errors.split(str(error))]:
            with wrong.going_on():
                raise InvalidInputError(f"{where}: {field}" if field else where, problem) from None
        wrong.raise_any()
        raise
