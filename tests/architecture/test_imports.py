"""Tests of what is loaded and touched: nothing that only others need, and Textual's private parts in one folder."""

import ast
import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import pytest
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS
from textual.command import Provider
from textual.widget import Widget

import trainctl.tui
from trainctl.tui.terminal import guard
from trainctl.tui.terminal.terminal_app import TerminalApp

ROOMS = ("protocol", "trainer", "node_agent", "tui")
HEAVY = (
    "textual",
    "torch",
    "mlx",
    "transformers",
    "zmq",
    "numpy",
    "sqlite3",
    "trainctl.trainer",
    "trainctl.node_agent",
)
BACKENDS = ("torch", "mlx", "transformers", "textual")
SCREENS = [f"trainctl.tui.screens.{name}" for name in ("runs", "charts", "events", "alerts", "node", "logs")]
DIALOGS = [f"trainctl.tui.dialogs.{name}" for name in ("help", "alert_details", "command_dialog")]
LS = ["ls", "--connect", "nonsense", "--json"]
SEND = ["send", "pause", "a=b", "--node", "x", "--timeout", "3", "--wait", "none"]
CALL = "trainctl.tui.cli.main as cli; assert cli.main({words!r}) == 2"


@pytest.mark.parametrize(
    ("module", "loads", "without"),
    [
        ("trainctl.tui.cli.main", "", HEAVY),
        (CALL.format(words=LS), "trainctl.tui.cli.runs", ("pydantic", "trainctl.tui.cli.run")),
        (CALL.format(words=SEND), "trainctl.tui.cli.send", ("pydantic", "trainctl.tui.cli.inspect")),
        (
            "trainctl.tui.app.launch",
            "trainctl.tui.screens.base",
            (*SCREENS, *DIALOGS, "trainctl.tui.charts.plots", "pydantic", "sqlite3"),
        ),
        ("trainctl.node_agent.cli", "", BACKENDS),
        ("trainctl.node_agent.agent", "", BACKENDS),
        ("trainctl.protocol.client.client", "", BACKENDS),
    ],
    ids=["program", "ls", "send", "screen", "agent's program", "agent", "client"],
)
def test_nothing_is_loaded_that_only_others_need(module: str, loads: str, without: tuple[str, ...]) -> None:
    paths = [str(ROOT / room) for room in ROOMS]
    code = f"import sys, json; sys.path[:0] = {paths!r}; import {module}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=HANG_SECONDS, check=True
    )
    loaded = {*json.loads(done.stdout.splitlines()[-1])}
    assert not loads or loads in loaded
    assert not loaded & {*without}


@pytest.mark.parametrize("room", ROOMS)
def test_the_namespace_has_no_file_of_its_own(room: str) -> None:
    assert not (ROOT / room / "trainctl" / "__init__.py").exists()
    assert (ROOT / room / "trainctl" / room / "__init__.py").is_file()
    assert (ROOT / room / "trainctl" / room / "py.typed").is_file()


HOME = "trainctl.tui.terminal"
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(trainctl.tui.__path__, "trainctl.tui.")
    if not found.name.startswith(HOME) and not found.name.endswith("__main__")
)
MADE_BY_TEXTUAL = frozenset(kind for base in (Widget, Provider) for kind in vars(type("Plain", (base,), {})))
"""Names that Python and Textual write into every subclass by themselves."""


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
    """Return whether the Textual classes that a class inherits from have it, or set it on their objects."""
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
