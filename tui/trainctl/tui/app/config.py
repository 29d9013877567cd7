"""The person's own settings of the screens: config.toml, read so that one bad line costs that line alone."""

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.protocol import messages as m
from trainctl.protocol.config.names import config_folder
from trainctl.protocol.errors import InvalidInputError

_MOST_PROBLEMS = 50
_AT_LINE = re.compile(r"\(at line (\d+)")
_HEADER = re.compile(r"\s*\[+\s*\"?([\w-]+)\"?\s*\]")


@dataclass(frozen=True)
class Settings:
    """What config.toml can say; what it doesn't say is found out (theme, ascii) or as here."""

    theme: str | None = None  # None: by the terminal
    ascii: bool | None = None  # None: by the locale
    bell: bool = True
    mouse: bool = True
    read_only: bool = False
    columns: tuple[str, ...] = ()  # metrics of ranks that the fleet table shows where it is wide
    keys: Mapping[str, str] = field(default_factory=dict)  # by action


@dataclass(frozen=True)
class Problem:
    """One line of the file that isn't used, and why."""

    path: Path
    line: int | None
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.text}" if self.line else f"{self.path}: {self.text}"


@dataclass(frozen=True)
class Found:
    """What a file says as far as it can be used."""

    path: Path
    exists: bool
    settings: Settings
    problems: tuple[Problem, ...] = ()


Check = Callable[[Mapping[str, str]], tuple[dict[str, str], dict[str, str]]]
"""Keys by action -> those that can be, and why the others can't."""


def default_path() -> Path:
    """config.toml in the platform's configuration folder, $XDG_CONFIG_HOME/trainctl where that is set."""
    return config_folder() / "config.toml"


def read(path: Path | None, themes: tuple[str, ...], check_keys: Check) -> Found:
    """The file at `path` (default: the user's own, which need not exist).

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
    """A file's text; of lines that can't be used each is a problem, and the others count."""
    lines = text.splitlines()
    raw, problems = _tables(lines, path)
    place = _places(lines)
    given: dict[str, Any] = {}

    def complain(where: tuple[str, str], words: str) -> None:
        problems.append(Problem(path, place.get(where), words))

    for name, value in raw.items():
        if name == "keys":
            continue
        wrong = _wrong(name, value, themes)
        if wrong:
            complain(("", name), f"{name}: {wrong}")
        else:
            given[name] = None if value == "auto" else tuple(value) if name == "columns" else value
    given["keys"] = _keys(raw.get("keys", {}), check_keys, complain)
    problems.sort(key=lambda problem: problem.line or 0)
    return Found(path, True, Settings(**given), tuple(problems[:_MOST_PROBLEMS]))


def _keys(raw: Any, check: Check, complain: Callable[[tuple[str, str], str], None]) -> dict[str, str]:
    if not isinstance(raw, dict):
        complain(("", "keys"), 'keys: must be a table: write [keys], and on the next line action = "key"')
        return {}
    texts: dict[str, str] = {}
    for name, value in raw.items():
        if isinstance(value, str):
            texts[name] = value
        else:
            complain(("keys", name), f'{name}: must be a string that names one or more keys, such as "f5" or "a,b"')
    good, bad = check(texts)
    for name, words in bad.items():
        complain(("keys", name), f"{name}: {words}")
    return good


def _wrong(name: str, value: Any, themes: tuple[str, ...]) -> str:
    """What is wrong with a setting outside the tables; nothing if it is right."""
    if name == "theme":
        return "" if value in ("auto", *themes) else f"no theme {value!r}; the themes are auto, {', '.join(themes)}"
    if name == "ascii":
        return "" if isinstance(value, bool) or value == "auto" else f'{value!r} must be "auto", true or false'
    if name in ("bell", "mouse", "read_only"):
        return "" if isinstance(value, bool) else f"{value!r} must be true or false"
    if name == "columns":
        return _wrong_columns(value)
    return "no such setting; the settings are theme, ascii, bell, mouse, read_only, columns and [keys]"


def _wrong_columns(value: Any) -> str:
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        return 'must be a list of metrics, such as ["user:reward", "memory_use"]'
    of_others = [one for one in value if m.metric_of(one).scope != "rank"]
    return f"{of_others[0]} is not a per-rank metric" if of_others else ""


def _tables(lines: list[str], path: Path) -> tuple[dict[str, Any], list[Problem]]:
    """The file as tables, without the lines that aren't TOML."""
    left = list(lines)
    problems: list[Problem] = []
    while True:
        try:
            return tomllib.loads("\n".join(left)), problems
        except tomllib.TOMLDecodeError as error:
            number = _line_of(str(error), left)
            problems.append(Problem(path, number, f"not TOML: {str(error).partition(' (at')[0].lower()}"))
            if len(problems) >= _MOST_PROBLEMS:
                return {}, problems
            left[number - 1] = ""


def _line_of(text: str, lines: list[str]) -> int:
    """The line that the parser stumbled over; of one that it found open at the end of the file, the last with text."""
    found = _AT_LINE.search(text)
    number = min(int(found[1]), len(lines)) if found else len(lines)
    while number > 1 and not lines[number - 1].strip():
        number -= 1
    return number


def _places(lines: list[str]) -> dict[tuple[str, str], int]:
    """(table, name) -> the line that it is on."""
    places: dict[tuple[str, str], int] = {}
    section = ""
    for number, text in enumerate(lines, 1):
        header = _HEADER.match(text)
        if header:
            section = header[1]
            places.setdefault(("", section), number)
        elif "=" in text and not text.lstrip().startswith("#"):
            name = text.partition("=")[0].strip().strip("\"'")
            places.setdefault((section, name), number)
    return places
