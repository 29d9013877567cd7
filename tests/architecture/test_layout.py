"""The plan of the house: no circle of files, folders of a size, the field's names, each once, and tests beside them.

Each point has a list of what still breaks it. The lists only shrink: what is listed and no longer so fails too.
"""

import ast
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("protocol", "trainer", "node_agent", "tui")
MOST_FILES = {"tui/screens": 40}
"""Other folders hold 25."""

_METAPHORS = """
afterthoughts agenda attendance audience book claims conclusions consents course desk door elsewhere equipment feed
ears ground grounds hosting keeper leash neighbours office offshoot openings outlook patience premises pulse resumption
rhythm ringer script standstills story succession talks tally turnstile warden way
"""
METAPHORS = frozenset(_METAPHORS.split())
"""Names that say nothing to who comes from the field: neither a file nor a class is called so."""
WORDS = METAPHORS - {"claims", "feed", "ground", "hosting", "script", "way"}
"""Those that are not a part of a name either; `live_feed` and `rank_hosting` say what they are."""
PHRASES = ("way back", "going back", "under way", "at work")
"""Some words in a row that are one."""

IN_CIRCLES: set[str] = set()
CROWDED: set[str] = set()
METAPHORICAL: set[str] = set()
FILES_TWICE: set[str] = set()
CLASSES_TWICE: set[str] = set()
NAMES_UNUSED: set[str] = set()
WITHOUT_DOCSTRING: set[str] = set()
TESTS_WITHOUT_FOLDER: set[str] = set()


def base(room: str) -> Path:
    return ROOT / room / "trainctl" / room


def files() -> dict[str, Path]:
    """Every module of the product by its dotted name."""
    found = {}
    for room in ROOMS:
        for path in sorted(base(room).rglob("*.py")):
            name = ".".join(path.relative_to(ROOT / room).with_suffix("").parts)
            found[name.removesuffix(".__init__")] = path
    return found


MODULES = files()


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree, parsed once, by workers that run these tests."""
    return {name: ast.parse(path.read_text("utf-8")) for name, path in MODULES.items()}


def label(path: Path) -> str:
    """`tui/app/keymap.py`."""
    room = path.relative_to(ROOT).parts[0]
    return f"{room}/{path.relative_to(base(room)).as_posix()}" if path != base(room) else room


def folders() -> list[Path]:
    """Every folder with code in it, the rooms themselves among them."""
    return sorted({path.parent for path in MODULES.values()})


def classes(name: str) -> list[str]:
    return [node.name for node in ast.walk(trees()[name]) if isinstance(node, ast.ClassDef)]


# ---------------------------------------------------------------- circles


def imported(name: str) -> set[str]:
    """The product's modules that one imports, at its top, for types alone or within a function."""
    found = set()
    for node in ast.walk(trees()[name]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            whole = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {one if one in MODULES else node.module for one in whole}
    return {one for one in found if one in MODULES and one != name}


def in_circles(edges: dict[str, set[str]]) -> set[str]:
    """Those that reach themselves."""

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*edges[start]]
        while waiting:
            one = waiting.pop()
            if one not in seen:
                seen.add(one)
                waiting += edges[one]
        return seen

    return {name for name in edges if name in reached(name)}


def test_circles_are_found() -> None:
    assert in_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == {"b", "c"}


def test_no_file_imports_itself_by_way_of_others() -> None:
    assert {label(MODULES[name]) for name in in_circles({name: imported(name) for name in MODULES})} == IN_CIRCLES


def test_a_module_that_a_text_names_is_there() -> None:
    """What is started with `python -m`, which no check of imports sees."""
    named = {
        node.value
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and re.fullmatch(r"trainctl\.(protocol|trainer|node_agent|tui)(\.[a-z_]+)+", str(node.value))
    }
    assert {"trainctl.trainer.collective.reducer", "trainctl.trainer.demo_assets"} <= named
    assert {name for name in named if name not in MODULES} == set()


# ---------------------------------------------------------------- folders


def test_no_folder_is_crowded() -> None:
    sizes = Counter(label(path.parent) for path in MODULES.values() if path.name != "__init__.py")
    assert {name for name, size in sizes.items() if size > MOST_FILES.get(name, 25)} == CROWDED


def test_every_folder_says_what_is_in_it() -> None:
    inits = [folder / "__init__.py" for folder in folders()]
    said = {init for init in inits if init.is_file() and ast.get_docstring(ast.parse(init.read_text("utf-8")))}
    assert {label(init.parent) for init in inits if init not in said} == WITHOUT_DOCSTRING


def test_tests_mirror_the_folders() -> None:
    found = {path.parent for room in ROOMS for path in (ROOT / "tests" / room).rglob("test_*.py")}
    places = {folder.relative_to(ROOT / "tests").as_posix(): folder for folder in found}
    rooms = {place: base(place.split("/")[0]) / "/".join(place.split("/")[1:]) for place in places}
    assert {place for place, mirrored in rooms.items() if not mirrored.is_dir()} == TESTS_WITHOUT_FOLDER


def test_no_test_file_imports_another() -> None:
    importing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) tests[\w.]*(\.| import )test_", path.read_text("utf-8"), re.MULTILINE)
    }
    assert importing == set(), "move what they share to support/, and fixtures to conftest.py"


# ---------------------------------------------------------------- names


def words(name: str) -> list[str]:
    """`RunBook` and `run_book` are of the words run and book."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)]


def is_metaphor(name: str) -> bool:
    found = words(name)
    phrase = any(one in " ".join(found) for one in PHRASES)
    return name.lower().strip("_") in METAPHORS or not WORDS.isdisjoint(found) or phrase


def test_metaphors_are_found() -> None:
    assert all(map(is_metaphor, ("book", "RunBook", "_Desk", "way_back", "WayBack", "_Ears", "Ground", "Feed")))
    assert not any(map(is_metaphor, ("live_feed", "Booking", "rank_hosting", "Script2", "player")))


def test_nothing_is_named_by_a_metaphor() -> None:
    found = {label(path) for path in MODULES.values() if is_metaphor(path.stem)}
    found |= {label(folder) for folder in folders() if is_metaphor(folder.name)}
    found |= {f"{label(MODULES[name])}: {one}" for name in MODULES for one in classes(name) if is_metaphor(one)}
    assert found == METAPHORICAL


def twice_among_siblings() -> Iterator[str]:
    """File names that two children of one folder have, but for a command of the command line and the screen, or part
    of the app, that shows the same."""
    for parent in folders():
        places: dict[str, list[str]] = defaultdict(list)
        for path in MODULES.values():
            if path.parent.parent == parent and path.name != "__init__.py":
                places[path.name].append(path.parent.name)
        for name, found in places.items():
            allowed = label(parent) == "tui" and len(found) == 2 and "cli" in found and {"screens", "app"} & {*found}
            if len(found) > 1 and not allowed:
                yield f"{label(parent)}: {name} in {', '.join(sorted(found))}"


def test_no_file_name_is_there_twice() -> None:
    assert {*twice_among_siblings()} == FILES_TWICE


def test_no_public_class_name_is_there_twice_in_a_room() -> None:
    """Of those that a module has; a widget's own messages are named with it, as Textual does."""
    found = set()
    for room in ROOMS:
        mine = [name for name in MODULES if name.split(".")[1] == room]
        tops = (node for name in mine for node in trees()[name].body if isinstance(node, ast.ClassDef))
        counted = Counter(node.name for node in tops if not node.name.startswith("_"))
        found |= {f"{room}: {one}" for one, count in counted.items() if count > 1}
    assert found == CLASSES_TWICE


def public_names(tree: ast.Module) -> Iterator[str]:
    """What a module defines for others, but for what a decorator hands on by itself."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.decorator_list:
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (one.id for target in node.targets for one in ast.walk(target) if isinstance(one, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def test_no_public_name_is_unused() -> None:
    """Something of the product, or an entry point, names it besides where it is defined; tests don't count."""
    texts = [path.read_text("utf-8") for path in MODULES.values()]
    texts.append((ROOT / "pyproject.toml").read_text("utf-8"))
    counted = Counter(word for text in texts for word in re.findall(r"\w+", text))
    found = {
        f"{label(MODULES[module])}: {name}"
        for module, tree in trees().items()
        for name in public_names(tree)
        if not name.startswith("_") and counted[name] < 2
    }
    assert found == NAMES_UNUSED


# ---------------------------------------------------------------- additions


@pytest.mark.parametrize(
    ("pattern", "most"),
    [("resize-batch|ResizeBatch", 7), ("memory_peak", 5)],  # one names the remedies of a diagnosis
    ids=["a verb", "a metric"],
)
def test_what_can_be_added_is_named_in_few_files(pattern: str, most: int) -> None:
    naming = [label(path) for path in MODULES.values() if re.search(pattern, path.read_text("utf-8"))]
    assert 0 < len(naming) <= most, naming


# ---------------------------------------------------------------- phases


def phases_typed_again(tree: ast.Module) -> bool:
    """Whether a file lists a step's phases itself, instead of by PHASES and BUSY_PHASES."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "__struct_fields__" and "Phases" in ast.unparse(node.value):
            return True
        items = node.keys if isinstance(node, ast.Dict) else getattr(node, "elts", [])
        texts = [ast.unparse(item) for item in items if item is not None]
        if re.search(r"'data(_seconds)?'.*'forward(_seconds)?'.*'backward(_seconds)?'", " ".join(texts)):
            return True
    return False


def test_phases_typed_again_are_found() -> None:
    for text in (
        "x = ('idle', 'data', 'forward', 'backward')", "x = {'data': 1, 'forward': 2, 'backward': 3}",
        "x = [('data', 1), ('forward', 2), ('backward', 3)]", "x = m.Phases.__struct_fields__",
        "x = ('data_seconds', 'forward_seconds', 'backward_seconds')",
    ):  # fmt: skip
        assert phases_typed_again(ast.parse(text)), text
    assert not phases_typed_again(ast.parse("x = (*BUSY_PHASES, 'sync'); y = ('data', 'model'); z = {**x, 'data': 1}"))


def test_phases_are_listed_in_one_file() -> None:
    found = {label(MODULES[name]) for name, tree in trees().items() if phases_typed_again(tree)}
    assert found == {"protocol/messages/trainer.py"}
