"""The person's own settings of the screens: config.toml, read so that one bad value costs that setting alone."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import msgspec

from trainctl.protocol.config import validation_errors
from trainctl.protocol.config.names import config_folder
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import metric_of

_AT = re.compile(r"\(at line (\d+), column (\d+)\)")


class Settings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """config.toml: a person's settings of the full screen."""

    keys_are_names: ClassVar[bool] = True
    theme: str = "auto"  # name of a theme; auto: by the terminal
    ascii: bool | Literal["auto"] = "auto"  # auto: true unless the locale is UTF-8
    bell: bool = True  # alerts ring the bell
    mouse: bool = True  # false: the terminal handles the mouse
    read_only: bool = False  # true: no commands are sent
    columns: tuple[str, ...] = ()  # metrics of ranks that the fleet table shows where it is wide
    keys: dict[str, str] = {}  # one or more keys by action, such as "f5,R"


@dataclass(frozen=True)
class Problem:
    """A part of the file that isn't used, and why."""

    path: Path
    line: int | None
    column: int | None
    text: str

    def __str__(self) -> str:
        return f"{':'.join(str(part) for part in (self.path, self.line, self.column) if part)}: {self.text}"


@dataclass(frozen=True)
class Found:
    """The settings of a file as far as they can be used."""

    path: Path
    exists: bool
    settings: Settings
    problems: tuple[Problem, ...] = ()


Check = Callable[[Mapping[str, str]], tuple[dict[str, str], dict[str, str]]]
"""Keys by action -> those that can be, and why the others can't."""


def default_path() -> Path:
    """Return config.toml in the platform's configuration folder, $XDG_CONFIG_HOME/trainctl where that is set."""
    return config_folder() / "config.toml"


def read(path: Path | None, themes: tuple[str, ...], check_keys: Check) -> Found:
    """Return the file at `path` (default: the user's own, which need not exist).

    Raises InvalidInputError for a file that was named and can't be read; all else that is wrong is a problem of its
    line.
    """
    at = path or default_path()
    try:
        text = at.read_text(encoding="utf-8")
    except FileNotFoundError:
        if path is not None:
            raise InvalidInputError(str(path), "no such configuration file: check the path") from None
        return Found(at, False, Settings())
    except (OSError, UnicodeDecodeError) as error:
        if path is not None:
            raise InvalidInputError(str(path), f"not a readable TOML file: {error}") from None
        return Found(at, True, Settings(), (Problem(at, None, None, f"not a readable TOML file: {error}"),))
    return parse(text, at, themes, check_keys)


def parse(text: str, path: Path, themes: tuple[str, ...], check_keys: Check) -> Found:
    """Return what a file's text sets: each value that can't be used is a problem, and the others count."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _AT.search(str(error))
        line, column = (int(match[1]), int(match[2])) if match else (None, None)
        words = str(error).partition(" (at")[0].lower()
        return Found(path, True, Settings(), (Problem(path, line, column, f"not TOML: {words}"),))
    wrong: dict[str, str] = {}
    kept: dict[str, Any] = {}
    for name, value in raw.items():
        problems_here = dict(validation_errors.found({name: value}, Settings))
        wrong |= problems_here
        if name == "keys" and isinstance(value, dict):
            kept[name] = {action: chosen for action, chosen in value.items() if isinstance(chosen, str)}
        elif not problems_here:
            kept[name] = value
    settings = msgspec.convert(kept, Settings)
    keys, bad_keys = check_keys(settings.keys)
    unusable = {**_unusable(settings, themes), **{f"keys.{name}": problem for name, problem in bad_keys.items()}}
    usable = {name: value for name, value in kept.items() if name not in unusable} | {"keys": keys}
    problems = [Problem(path, *_place(text, field), f"{field}: {why}") for field, why in {**wrong, **unusable}.items()]
    problems.sort(key=lambda problem: (problem.line or 0, problem.column or 0))
    return Found(path, True, msgspec.convert(usable, Settings), tuple(problems))


def _unusable(settings: Settings, themes: tuple[str, ...]) -> dict[str, str]:
    """Return why settings of the right type can't be used, by name."""
    unusable = {}
    if settings.theme not in ("auto", *themes):
        unusable["theme"] = f"no theme {settings.theme!r}; the themes are auto, {', '.join(themes)}"
    others = [metric for metric in settings.columns if metric_of(metric).scope != "rank"]
    if others:
        unusable["columns"] = f"{others[0]} is not a per-rank metric"
    return unusable


def _place(text: str, field: str) -> tuple[int | None, int | None]:
    """Return the line and column of a field's value, where it is written plainly."""
    table, _, name = field.partition("[")[0].rpartition(".")
    before, header, after = text.partition(f"[{table}]") if table else ("", "", text)
    match = re.search(rf"^[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*=[ \t]*", after, re.MULTILINE)
    if match is None:
        return None, None
    until = f"{before}{header}{after[: match.end()]}"
    return until.count("\n") + 1, len(until) - until.rfind("\n")
