"""`python -m tools.house_rules`: rules of style that no other linter has, over product, tools and benchmarks.

- A docstring begins with a verb or a noun, not with "Of", "What", "Whether", "That", "Which" or "How".
- A module is imported under its name, not as one letter.
- Nothing is kept from the formatter by a comment.
- A function has at most six parameters that are passed by position; commands of typer may have more.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
ROOMS: Final = ("protocol", "node_agent", "trainer", "tui", "tools", "benchmarks")
OPENINGS: Final = frozenset({"Of", "What", "Whether", "That", "Which", "How"})
UNFORMATTED: Final = "# fmt: " + "skip"
MAX_POSITIONAL: Final = 6
ALLOWED: Final[dict[tuple[str, str], int]] = {
    ("benchmarks", "format"): 42,
    ("protocol", "format"): 27,
}
"""The most offences of a rule in a room. They only become fewer: lower a number when the tool says so."""


@dataclass(frozen=True)
class Offence:
    """A line that breaks a rule."""

    rule: str
    path: Path
    line: int
    text: str

    @property
    def room(self) -> str:
        return self.path.relative_to(ROOT).parts[0]

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
                if word in OPENINGS:
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
    """Print the offences of rooms that have more than allowed; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.house_rules")
    parser.add_argument("--all", action="store_true", help="print the allowed ones too")
    show_all = parser.parse_args().all
    seen = [offence for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) for offence in offences(path)]
    counts = Counter((offence.room, offence.rule) for offence in seen)
    above = {key for key, count in counts.items() if count > ALLOWED.get(key, 0)}
    for offence in seen:
        if show_all or (offence.room, offence.rule) in above:
            print(offence)
    for room, rule in sorted(above):
        print(f"{room}: {counts[room, rule]} of {rule}; {ALLOWED.get((room, rule), 0)} are allowed", file=sys.stderr)
    for (room, rule), most in sorted(ALLOWED.items()):
        if counts[room, rule] < most:
            print(f"{room}: only {counts[room, rule]} of {rule} are left: lower ALLOWED", file=sys.stderr)
    return 1 if above else 0


if __name__ == "__main__":
    sys.exit(main())
