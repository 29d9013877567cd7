"""The docs: each link leads somewhere, each picture is shown, and what the architecture page names is in the code."""

import ast
import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from tests.conftest import ROOT
from tools.protocol_docs import docs

from tools import pages

DOCS = sorted((ROOT / "docs").glob("*.md"))
MOST_README_LINES, MOST_ROW_CHARACTERS = 110, 240
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS


def links(page: Path) -> list[str]:
    """Return where the links of a page lead, those outside of the repository left out."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]


def leads(page: Path, link: str) -> bool:
    """Return whether a page's link names a file of the repository, and a heading in it if it names one."""
    name, _, anchor = unquote(link).partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return False
    return not anchor or anchor in docs.anchors(file.read_text("utf-8"))


def test_every_link_leads_somewhere_and_every_page_is_in_the_index() -> None:
    assert [f"{page.name}: {link}" for page in PAGES for link in links(page) if not leads(page, link)] == []
    assert {page.name for page in DOCS} - set(links(ROOT / "docs" / "README.md")) == {"README.md"}
    assert "docs/README.md" in links(ROOT / "README.md")


def test_every_picture_is_shown_and_kept_in_one_folder() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page) if ".svg" in link}
    assert shown == set(pages.PICTURES.glob("*"))


def test_the_readme_is_read_in_one_go() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= MOST_README_LINES


def measurements() -> list[list[list[str]]]:
    """Return the tables of measurements.md, each as rows of cells, the heading first."""
    text = (ROOT / "docs" / "measurements.md").read_text("utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()] for table in found]


def test_every_measurement_is_short_and_names_its_command() -> None:
    for heading, _, *rows in measurements():
        for row in rows:
            assert len(" | ".join(row)) <= MOST_ROW_CHARACTERS, row
            if "command" in heading:
                command = row[heading.index("command")]
                assert command in ("by hand", "the same") or re.fullmatch(r"`[^`]+`", command), row


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
