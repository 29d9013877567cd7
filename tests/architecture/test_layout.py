"""The plan of the product: no circle of files, folders of a size, names once, none unused, and tests beside them."""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import ROOT

ROOMS = ("protocol", "trainer", "node_agent", "tui")
MOST_FILES = {"tui/screens": 40}
"""Other folders hold 25."""


def base(room: str) -> Path:
    return ROOT / room / "trainctl" / room


@functools.cache
def modules() -> dict[str, Path]:
    """Return every module of the product by its dotted name."""
    paths = {room: sorted(base(room).rglob("*.py")) for room in ROOMS}
    return {
        ".".join(path.relative_to(ROOT / room).with_suffix("").parts).removesuffix(".__init__"): path
        for room, several in paths.items()
        for path in several
    }


@functools.cache
def trees() -> dict[str, ast.Module]:
    return {name: ast.parse(path.read_text("utf-8")) for name, path in modules().items()}


def label(path: Path) -> str:
    """Return a path in short: `tui/app/keymap.py`."""
    room = path.relative_to(ROOT).parts[0]
    return f"{room}/{path.relative_to(base(room)).as_posix()}" if path != base(room) else room


def imported(name: str) -> set[str]:
    """Return the product's modules that a module imports, at its top, for types alone or within a function."""
    found = set()
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in modules() else node.module for each in whole}
    return {each for each in found if each in modules() and each != name}


def test_no_file_imports_itself_by_way_of_others() -> None:
    edges = {name: imported(name) for name in modules()}
    while leaves := {name for name, targets in edges.items() if not targets & edges.keys()}:
        edges = {name: targets for name, targets in edges.items() if name not in leaves}
    assert [*edges] == [], "these are in a circle, or import a file of one"


def test_a_module_that_a_text_names_is_there() -> None:
    """Modules that are started with `python -m`, which no check of imports sees."""
    named = {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and re.fullmatch(r"trainctl\.(protocol|trainer|node_agent|tui)(\.[a-z_]+)+", str(node.value))
    }
    assert "trainctl.trainer.collective.reducer" in named
    assert {name for name in named if name not in modules()} == set()


def test_no_folder_is_crowded() -> None:
    sizes = Counter(label(path.parent) for path in modules().values() if path.name != "__init__.py")
    assert {name: size for name, size in sizes.items() if size > MOST_FILES.get(name, 25)} == {}


def test_tests_mirror_the_folders() -> None:
    tests = {path.parent for room in ROOMS for path in (ROOT / "tests" / room).rglob("test_*.py")}
    places = [folder.relative_to(ROOT / "tests") for folder in tests]
    packages = {room: (base(room), base(room).parent) for room in ROOMS}  # the latter for protocol's second, `guest`
    mirrored = {
        place
        for place in places
        if any(package.joinpath(*place.parts[1:]).is_dir() for package in packages[place.parts[0]])
    }
    assert [place for place in places if place not in mirrored] == []


def test_no_test_file_imports_another() -> None:
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) tests[\w.]*(\.| import )test_", path.read_text("utf-8"), re.MULTILINE)
    }
    assert importing == set(), "move what they share to support/, and fixtures to conftest.py"


def test_no_file_name_is_twice_among_siblings() -> None:
    """But for a command of the command line and the screen, or part of the app, that shows the same."""
    for parent in {path.parent for path in modules().values()}:
        places: dict[str, set[str]] = defaultdict(set)
        for path in modules().values():
            if path.parent.parent == parent and path.name != "__init__.py":
                places[path.name].add(path.parent.name)
        for name, folders in places.items():
            shown = label(parent) == "tui" and folders in ({"cli", "screens"}, {"cli", "app"})
            assert len(folders) == 1 or shown, f"{name} is in {sorted(folders)} of {label(parent)}"


def test_no_public_class_name_is_twice_in_a_room() -> None:
    """Only classes of modules count; a widget's own messages are named with it, as Textual does."""
    for room in ROOMS:
        own = [name for name in modules() if name.split(".")[1] == room]
        classes = [node.name for name in own for node in trees()[name].body if isinstance(node, ast.ClassDef)]
        counts = Counter(name for name in classes if not name.startswith("_"))
        assert {name for name, count in counts.items() if count > 1} == set(), room


def public_names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module defines for others, but for what a decorator hands on by itself."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (each.id for target in node.targets for each in ast.walk(target) if isinstance(each, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_no_public_name_is_unused() -> None:
    """Something of the product, or an entry point, names it besides where it is defined; tests don't count."""
    texts = [path.read_text("utf-8") for path in modules().values()]
    texts.append((ROOT / "pyproject.toml").read_text("utf-8"))
    counts = Counter(word for text in texts for word in re.findall(r"\w+", text))
    unused = {
        f"{label(modules()[module])}: {name}"
        for module, tree in trees().items()
        for name in public_names(tree)
        if not name.startswith("_") and counts[name] < 2 and name not in policies(tree)
    }
    assert unused == set()


def policies(tree: ast.Module) -> set[str]:
    """Return a module's policies, which their registry finds by their base."""
    classes = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name for node in classes if any(ast.unparse(base) == "Policy" for base in node.bases)}
