"""docs/architecture.md is held to the code: its folders, their sentences, and every function of its walks."""

import ast
import re
from pathlib import Path

import pytest
from tests.conftest import ROOT

ROOMS = ("protocol", "trainer", "node_agent", "tui")
PAGE = (ROOT / "docs" / "architecture.md").read_text("utf-8")
STOPS = re.findall(r"`((?:protocol|trainer|node_agent|tui)/[\w/]+\.py):(\w+)`", PAGE)
PATHS = [
    path
    for path in re.findall(r"`((?:protocol|trainer|node_agent|tui|tests)/[\w/]+(?:\.py|/))`", PAGE)
    if "NAME" not in path
]


def source(path: str) -> Path:
    room, _, rest = path.partition("/")
    return ROOT / path if room == "tests" else ROOT / room / "trainctl" / room / rest


def folders(room: str) -> dict[str, str]:
    """Each folder of a room with the first sentence or two of its docstring."""
    base = ROOT / room / "trainctl" / room
    found = {}
    for file in sorted(base.rglob("__init__.py")):
        if file.parent != base:
            text = ast.get_docstring(ast.parse(file.read_text("utf-8"))) or ""
            found[file.parent.relative_to(base).as_posix()] = " ".join(text.split("\n\n")[0].split())
    return found


def test_each_stop_of_a_walk_and_each_path_is_in_the_code() -> None:
    assert STOPS
    for path, function in STOPS:
        tree = ast.parse(source(path).read_text("utf-8"))
        names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert function in names, f"{path} has no {function}"
    assert [path for path in PATHS if not source(path).exists()] == []


@pytest.mark.parametrize("room", ROOMS)
def test_every_folder_has_its_sentence(room: str) -> None:
    part = re.search(rf"^\*\*{room}/\*\*.*?(?=^\*\*\w+/\*\*|^## )", PAGE, flags=re.MULTILINE | re.DOTALL)
    assert part is not None
    rows = dict(re.findall(r"^\| `([\w/]+)/` \| (.*) \|$", part[0], flags=re.MULTILINE))
    assert rows == folders(room)
