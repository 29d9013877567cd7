"""Textual's private parts are used in tui/terminal/ alone, behind its guard."""

import ast
import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from textual.command import Provider
from textual.widget import Widget

import trainctl.tui
from trainctl.tui.terminal import guard
from trainctl.tui.terminal.terminal_app import TerminalApp

HOME = "trainctl.tui.terminal"
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(trainctl.tui.__path__, "trainctl.tui.")
    if not found.name.startswith(HOME) and not found.name.endswith("__main__")
)
MADE_BY_TEXTUAL = frozenset(kind for base in (Widget, Provider) for kind in vars(type("Plain", (base,), {})))
"""What Python and Textual write into every subclass by themselves."""


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def imported(module: ModuleType) -> Iterator[str]:
    """The modules that one imports from."""
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{item.name}" for item in node.names)
        elif isinstance(node, ast.Import):
            yield from (item.name for item in node.names)


def codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from codes(inner)


def of_textual(kind: type[Any], name: str) -> bool:
    """Whether the Textual classes that a class inherits from have it, or set it on their objects."""
    bases = [base for base in kind.__mro__ if base.__module__.startswith("textual.")]
    return any(name in vars(base) or guard._sets(base, name) for base in bases)


def touched(kind: type[Any]) -> set[str]:
    """The private parts of its Textual bases that a class overrides or names."""
    functions = [item for item in vars(kind).values() if isinstance(item, FunctionType)]
    functions += [item.fget for item in vars(kind).values() if isinstance(item, property) and item.fget is not None]  # type: ignore[misc]
    named = {name for function in functions for code in codes(function.__code__) for name in code.co_names}
    return {name for name in named | set(vars(kind)) if private(name) and of_textual(kind, name)} - MADE_BY_TEXTUAL


def named(module: ModuleType) -> Iterator[str]:
    """The guard's private parts that a module names of anything but its own objects."""
    parts = {part for kinds in guard.PARTS.values() for names in kinds.values() for part in names if private(part)}
    for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text("utf-8"))):
        if isinstance(node, ast.Attribute) and node.attr in parts and ast.unparse(node.value) != "self":
            yield node.attr


def test_no_other_folder_touches_them() -> None:
    found: dict[str, set[str]] = {}
    for name in MODULES:
        module = importlib.import_module(name)
        found[name] = {path for path in imported(module) if path.startswith("textual") and "._" in path}
        found[name] |= set(named(module))
        for kind in vars(module).values():
            if isinstance(kind, type) and kind.__module__ == name:
                found[name] |= touched(kind)
    assert {name: parts for name, parts in found.items() if parts} == {}
    assert len(found) > 100 and touched(TerminalApp) == {"_display"}, "nothing was looked at"
