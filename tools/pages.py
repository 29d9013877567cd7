"""`python -m tools.pages [--check]`: writes all that is generated in docs, or names what is out of date.

That is docs/protocol.md, docs/protocol-agents.md and docs/protocol.schema.json from the message types, the schemas of
the TOML files from the types of their tables, the tables of docs/keys.md from the key bindings, that of
docs/from-other-trainers.md from the names that errors explain, that of docs/diagnosis.md from the rules of the
diagnosis, docs/python-api.md from the clients, and the pictures from those that the tests of the screens compare.
"""

import argparse
import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

from tools import file_schemas
from tools.pictures import as_svg
from tools.protocol_docs import docs, generated, schema
from trainctl.protocol import errors
from trainctl.protocol.analysis.diagnosis.rules.table import RULES
from trainctl.protocol.client import BlockingClient, Client, attach_cluster
from trainctl.protocol.config.validation_errors import NAMES_ELSEWHERE
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.security.keyring import Keyring
from trainctl.tui.app import keymap
from trainctl.tui.widgets.theme import THEMES

PICTURES: Final = generated.ROOT / "docs" / "pictures"
SNAPSHOTS: Final = generated.ROOT / "tests" / "tui" / "screens" / "__snapshots__"
SOURCES: Final = {
    "group.svg": "test_pictures/test_overview_of_a_mixed_group[120x40].txt",
    "node.svg": "test_pictures/test_node[120x40].txt",
    "calibration.svg": "test_calibration/test_pictures[120x40].txt",
    "charts.svg": "test_charts/test_charts_with_log_crosshair_smoothing_and_tokens[120x40].txt",
    "events.svg": "test_pictures/test_tables[events-120x40].txt",
    "alert.svg": "test_alerts/test_picture_of_alerts_on_the_overview[why].txt",
    "diagnosis.svg": "test_diagnosis/test_the_screen[several-120x40].txt",
    "policies.svg": "test_policies/test_the_panel_on_a_policy_that_has_acted[120x40].txt",
    "profile.svg": "test_step_profile/test_the_screen[120x40].txt",
    "split.svg": "test_pictures/test_split_dialog[plan].txt",
}
"""Picture of the docs -> picture of the tests."""
_HEADINGS: Final = {"": "Everywhere", "stepprofile": "Profile"}
"""Headings of screens whose actions have another name."""


def keys_page() -> str:
    """Return docs/keys.md."""
    lines: list[str] = []
    where = None
    for row in keymap.rows({}):
        if row.where != where:
            where = row.where
            heading = _HEADINGS.get(where, where.capitalize())
            lines += ["", f"## {heading}", "", "|key|action||", "|---|---|---|"]
        lines.append(f"|{' '.join(f'`{key}`' for key in row.keys.split())}|`{row.name}`|{row.words}|")
    themes = ", ".join(f'`"{theme.name}"`' for theme in THEMES)
    return generated.filled(Path("docs/keys.md"), {"keys": "\n".join(lines), "themes": themes})


def diagnosis_page() -> str:
    """Return docs/diagnosis.md with the table of its rules."""
    table = ["|cause|what is wrong|what shows it|explains|", "|---|---|---|---|"]
    for rule in RULES:
        follows = ", ".join(f"`{cause}`" for cause in rule.explains)
        table.append(f"|`{rule.cause}`|{rule.title}|{rule.sign}|{follows}|")
    return generated.filled(Path("docs/diagnosis.md"), {"rules": "\n".join(table)})


def names_page() -> str:
    """Return docs/from-other-trainers.md."""
    by_own: dict[str, list[str]] = {}
    for name, own in NAMES_ELSEWHERE.items():
        by_own.setdefault(own, []).append(f"`{name}`")
    rows = [f"| {', '.join(names)} | `{own}` |" for own, names in sorted(by_own.items())]
    table = ["| other trainers | here |", "| --- | --- |", *rows]
    return generated.filled(Path("docs/from-other-trainers.md"), {"names": "\n".join(table)})


def python_page() -> str:
    """Return docs/python-api.md, from signatures and docstrings."""
    classes = "\n\n".join(_class(kind) for kind in (Client, BlockingClient, Keyring))
    raised = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TrainctlError)]
    table = ["| exception | kind of | exit code | raised |", "| --- | --- | --- | --- |"]
    for kind in raised:
        base = kind.__mro__[1].__name__
        table.append(f"| `{kind.__name__}` | `{base}` | {kind.exit_code} | {_doc(kind).replace(chr(10), ' ')} |")
    blocks = {"classes": classes, "functions": _function(attach_cluster), "errors": "\n".join(table)}
    return generated.filled(Path("docs/python-api.md"), blocks)


def _class(kind: type) -> str:
    """Return a class with its methods; of those that a client named before has too, only the names."""
    methods = [value for name, value in vars(kind).items() if inspect.isfunction(value) and name[0] != "_"]
    before = [] if kind is Client else vars(Client)
    own = [_function(method) for method in methods if method.__name__ not in before]
    also = ", ".join(f"`{method.__name__}`" for method in methods if method.__name__ in before)
    shared = [f"{also}: as those of `Client`, without `await`."] if also else []
    return "\n\n".join([f"### {kind.__name__}", _doc(kind), _function(vars(kind)["__init__"]), *own, *shared])


def _function(function: Callable[..., object]) -> str:
    """Return a function's signature as it is written, without `self`, and its docstring."""
    node = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    node.args.args = [argument for argument in node.args.args if argument.arg != "self"]
    node.args.posonlyargs = [argument for argument in node.args.posonlyargs if argument.arg != "self"]
    name = function.__qualname__.split(".")[0] if node.name == "__init__" else node.name
    kind = "async def " if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function) else "def "
    returns = f" -> {ast.unparse(node.returns)}" if node.returns is not None and node.name != "__init__" else ""
    return f"```python\n{kind}{name}({ast.unparse(node.args)}){returns}\n```\n\n{_doc(function)}"


def _doc(item: object) -> str:
    return inspect.getdoc(item) or ""


def files() -> Iterator[tuple[Path, bytes]]:
    """Yield each generated file of docs and what it must contain."""
    pages: dict[Path, Callable[[], str]] = {
        docs.CLIENTS: partial(docs.page, docs.CLIENTS),
        docs.AGENTS: partial(docs.page, docs.AGENTS),
        schema.DEFAULT_PATH: schema.page,
        Path("docs/keys.md"): keys_page,
        Path("docs/diagnosis.md"): diagnosis_page,
        Path("docs/from-other-trainers.md"): names_page,
        Path("docs/python-api.md"): python_page,
    }
    pages |= {Path(f"docs/{name}.schema.json"): partial(file_schemas.page, name) for name in file_schemas.FILES}
    for path, page in pages.items():
        yield generated.ROOT / path, page().encode()
    for name, source in SOURCES.items():
        yield PICTURES / name, as_svg((SNAPSHOTS / source).read_text("utf-8")).encode()


def main() -> int:
    """Write or check all; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pages")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is out of date")
    check = parser.parse_args().check
    stale = [(path, content) for path, content in files() if not path.is_file() or path.read_bytes() != content]
    for path, content in stale:
        if check:
            print(f"{path.relative_to(generated.ROOT)} is out of date: run python -m tools.pages", file=sys.stderr)
        else:
            path.write_bytes(content)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
