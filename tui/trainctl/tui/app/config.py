"""The person's own settings of the screens: config.toml, read so that one bad value costs that setting alone."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from trainctl.protocol.config.names import config_folder
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import metric_of

_AT_LINE = re.compile(r"\(at line (\d+)")
_NO_KEYS = 'must be a string that names one or more keys, such as "f5" or "a,b"'
_TYPES: Mapping[str, tuple[Any, str]] = {
    "theme": (str, 'must be the name of a theme, or "auto"'),
    "ascii": (bool | Literal["auto"], 'must be "auto", true or false'),
    "bell": (bool, "must be true or false"),
    "mouse": (bool, "must be true or false"),
    "read_only": (bool, "must be true or false"),
    "columns": (tuple[str, ...], 'must be a list of metrics, such as ["user:reward", "memory_use"]'),
    "keys": (dict[str, Any], 'must be a table: write [keys], and on the next line action = "key"'),
}
"""The type of each setting's value, and the text about a wrong one."""


@dataclass(frozen=True)
class Settings:
    """Settings of config.toml; what it doesn't say is found out (theme, ascii) or as here."""

    theme: str | None = None  # None: by the terminal
    ascii: bool | None = None  # None: by the locale
    bell: bool = True
    mouse: bool = True
    read_only: bool = False
    columns: tuple[str, ...] = ()  # metrics of ranks that the fleet table shows where it is wide
    keys: Mapping[str, str] = field(default_factory=dict)  # by action


@dataclass(frozen=True)
class Problem:
    """The parts of the file that aren't used, and why."""

    path: Path
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


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
        return Found(at, True, Settings(), (Problem(at, None, f"not a readable TOML file: {error}"),))
    return parse(text, at, themes, check_keys)


def parse(text: str, path: Path, themes: tuple[str, ...], check_keys: Check) -> Found:
    """Return what a file's text sets: each value that can't be used is a problem, and the others count."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        match = _AT_LINE.search(str(error))
        words = str(error).partition(" (at")[0].lower()
        return Found(path, True, Settings(), (Problem(path, int(match[1]) if match else None, f"not TOML: {words}"),))
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for name, value in raw.items():
        try:
            values[name] = _checked(name, value, themes)
        except ValueError as error:
            problems.append(Problem(path, _line_of(text, name), f"{name}: {error}"))
    keys = values.get("keys", {})
    texts = {name: value for name, value in keys.items() if isinstance(value, str)}
    values["keys"], wrong = check_keys(texts)
    wrong |= dict.fromkeys(keys.keys() - texts.keys(), _NO_KEYS)
    problems += [Problem(path, _line_of(text, name, "keys"), f"{name}: {words}") for name, words in wrong.items()]
    problems.sort(key=lambda problem: problem.line or 0)
    return Found(path, True, Settings(**values), tuple(problems))


def _checked(name: str, value: Any, themes: tuple[str, ...]) -> Any:
    """Return a setting's value. Raises ValueError that says what it must be."""
    if name not in _TYPES:
        raise ValueError("no such setting; the settings are theme, ascii, bell, mouse, read_only, columns and [keys]")
    kind, rule = _TYPES[name]
    try:
        checked = msgspec.convert(value, kind)
    except msgspec.ValidationError:
        raise ValueError(rule) from None
    if name == "theme" and checked not in ("auto", *themes):
        raise ValueError(f"no theme {checked!r}; the themes are auto, {', '.join(themes)}")
    others = [metric for metric in checked if metric_of(metric).scope != "rank"] if name == "columns" else []
    if others:
        raise ValueError(f"{others[0]} is not a per-rank metric")
    return None if checked == "auto" else checked


def _line_of(text: str, name: str, table: str = "") -> int | None:
    """Return the line on which a setting is, where it is written plainly."""
    before, header, after = text.partition(f"[{table}]") if table else ("", "", text)
    match = re.search(rf"^[ \t]*[\"']?{re.escape(name)}[\"']?[ \t]*=", after, re.MULTILINE)
    return f"{before}{header}{after[: match.start()]}".count("\n") + 1 if match else None
