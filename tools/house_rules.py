"""`python -m tools.house_rules`: rules of style that no other linter has, over product, tools, benchmarks and, for
docstrings, tests.

- A docstring begins with a verb or a noun, not with "Of", "What", "Whether", "That", "Which", "How", "Whatever",
  "Whose" or "The same".
- A module is imported under its name, not as one letter.
- Nothing is kept from the formatter by a comment.
- A function has at most six parameters that are passed by position; commands of typer may have more.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ROOMS: Final = ("protocol", "node_agent", "trainer", "tui", "tools", "benchmarks")
OPENINGS: Final = frozenset({"Of", "What", "Whether", "That", "Which", "How", "Whatever", "Whose"})
UNFORMATTED: Final = "# fmt: " + "skip"
MAX_POSITIONAL: Final = 6


@dataclass(frozen=True)
class Offence:
    """A line that breaks a rule."""

    rule: str
    path: Path
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.rule}: {self.text}"


def offences(path: Path) -> Iterator[Offence]:
    """Yield the offences of a Python file."""
    source = path.read_text("utf-8")
    for line, text in enumerate(source.splitlines(), 1):
        if UNFORMATTED in text:
            yield Offence("format", path, line, "leave the layout to the formatter")
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str() as text)):
                word = text.split(maxsplit=1)[0].rstrip(",:") if text.strip() else ""
                if word in OPENINGS or text.startswith("The same "):
                    yield Offence("docstring", path, node.lineno, f"begins with {word!r}, not with a verb or a noun")
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                for name in names:
                    if name.asname is not None and len(name.asname) == 1:
                        yield Offence("alias", path, node.lineno, f"import the names of {name.name}, not {name.asname}")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                count = _positional(node)
                if count > MAX_POSITIONAL:
                    text = f"{node.name} has {count} parameters by position: pass a record, or keywords"
                    yield Offence("parameters", path, node.lineno, text)
            case _:
                pass


def _positional(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the number of parameters that are passed by position: none of a command, which typer calls by name."""
    for decorator in function.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else None
        if isinstance(called, ast.Attribute) and called.attr in ("command", "callback"):
            return 0
    names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def main() -> int:
    """Print all offences; return the exit status."""
    seen = [offence for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for offence in offences(path)]
    of_tests = (offence for path in sorted((ROOT / "tests").rglob("*.py")) for offence in offences(path))
    seen += [offence for offence in of_tests if offence.rule == "docstring"]
    for offence in seen:
        print(offence)
    return 1 if seen else 0


if __name__ == "__main__":
    sys.exit(main())
