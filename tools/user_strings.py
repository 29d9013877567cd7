"""Every text that a person reads, one per line, with its place and its kind.

`python -m tools.user_strings` lists them; `--kind error` one kind; `--draw 10 --seed 1` draws some at random, for a
reader. Listed are texts of at least two words, and single words that go to the screen: help, options, errors, events,
alerts, dialogs, hints, log lines, what the doctor finds, reports, and the paragraphs of the pages.
"""

import argparse
import ast
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
PROGRAM: Final = ("protocol", "trainer", "node_agent", "tui", "tools/setup_venv.py", "examples/python")
PAGES: Final = ("README.md", "CONTRIBUTING.md", "docs")
GAP: Final = "…"
"""Stands for what a text is filled in with."""
_KINDS: Final = (
    ("event", "messages/event_prose.py"), ("alert", "node_agent/alerts/"),
    ("doctor", "tui/doctor/"), ("doctor", "clients/doctor.py"), ("dialog", "tui/dialogs/"), ("dialog", "tui/commands/"),
    ("screen", "tui/screens/"), ("screen", "tui/widgets/"), ("screen", "tui/charts/"), ("screen", "tui/app/"),
    ("report", "tui/report/"),
)  # fmt: skip
"""Of what kind a text is, by where it stands; the first that fits."""
_HELP_CALLS: Final = {"Option", "Argument", "Typer", "ArgumentParser", "add_argument", "_about", "Verb", "Binding"}
_LOG_CALLS: Final = {"debug", "info", "warning", "error", "exception", "critical"}
_ON_SCREEN: Final = {"Piece", "KeyHint", "RunsColumn", "NoInverse", "notify", "echo", "print", "write"}
"""Calls whose text a person sees even if it is one word."""
_NAMED: Final = {
    "title",
    "label",
    "help",
    "reason",
    "why",
    "text",
    "changes",
    "keeps",
    "placeholder",
    "prompt",
    "tooltip",
}
"""Arguments that are such a text."""
_COMMANDS: Final = re.compile(r"/cli/\w+\.py$|/cli\.py$|/service_commands\.py$")
"""Files whose public functions may be commands, of which `--help` prints the docstring."""
_WORD: Final = re.compile(r"[A-Za-z][a-z'-]+")
_CODE: Final = re.compile(
    r"^\s*(SELECT|INSERT|UPDATE|DELETE|REPLACE|CREATE|ALTER|PRAGMA|WITH|CASE|FROM|WHERE|AND )\b|^[#.$]"
    r"|^import \w|^\w+\[.*\]$|\{[^}]*:[^}]*;"
    r"|\(SELECT |\bNOT NULL\b|\bREAL$| JOIN |, 1 AS |^typeof\(|^BETWEEN :|^[\w.…]+(, [\w.…]+){8,}$"  # parts of SQL
    r"|^[\w.]+\[[^\]]*\]( \| \w+)*$|^KeyPair\("  # types
    r"|\(\.\+\)|\(\\[dS]\+\)|[a-z]\|[A-Z]"  # patterns
    r"|#[0-9a-f]{6}\b"  # colours
    r"|^</?[a-z!]"  # markup
)
"""SQL, paths, programs, types, patterns, colours, style sheets and markup, which no one reads as text."""


class Text(NamedTuple):
    """One text as it stands in the source; GAP is what it is filled in with."""

    file: str
    line: int
    kind: str
    words: str


def all_texts(root: Path = ROOT) -> list[Text]:
    """Every text of the program and its pages, in the order of files and lines."""
    found: list[Text] = []
    for path in _files(root, PROGRAM, ".py"):
        found += _of_program(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    for path in _files(root, PAGES, ".md"):
        found += _of_page(path.relative_to(root).as_posix(), path.read_text("utf-8"))
    return found


def _files(root: Path, places: tuple[str, ...], suffix: str) -> Iterator[Path]:
    for place in places:
        path = root / place
        yield from [path] if path.is_file() else sorted(path.rglob(f"*{suffix}"))


# ---------------------------------------------------------------- the program


def _of_program(file: str, source: str) -> Iterator[Text]:
    tree = ast.parse(source)
    yield from sorted(_Reader(file).read(tree), key=lambda text: text.line)


class _Reader(ast.NodeVisitor):
    """Walks one file with what surrounds each text in mind."""

    def __init__(self, file: str) -> None:
        self._file, self._found = file, list[Text]()
        self._around: list[str] = []  # names of the calls around, "raise", and arguments' names

    def read(self, tree: ast.Module) -> list[Text]:
        self.visit(tree)
        return self._found

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if _COMMANDS.search(self._file) and not node.name.startswith("_") and (said := ast.get_docstring(node)):
            self._keep(node.lineno, "help", said)
        self._visit_body(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._visit_body(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._visit_body(node)

    def visit_Module(self, node: ast.Module) -> None:
        self._visit_body(node)

    def _visit_body(self, node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """All but the docstrings, which are a reader of the code's."""
        for field, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if isinstance(part, ast.AST) and not (field == "body" and _is_docstring(part)):
                    self.visit(part)

    def visit_Expr(self, node: ast.Expr) -> None:
        if not _is_docstring(node):  # the note on a constant
            self.generic_visit(node)

    def visit_Raise(self, node: ast.Raise) -> None:
        self._within("raise", node)

    def visit_Call(self, node: ast.Call) -> None:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if name == "Piece":  # the words, then their role and what a click does
            self._within(name, ast.Expr(node.args[0]) if node.args else node)
            return
        is_log = isinstance(node.func, ast.Attribute) and getattr(node.func.value, "id", "") == "log"
        self._within("log" if is_log and name in _LOG_CALLS else name, node)

    def visit_keyword(self, node: ast.keyword) -> None:
        self._within(f"{node.arg}=", node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._take(node.lineno, node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        parts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values]
        self._take(node.lineno, "".join(parts))
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                self.visit(part.value)

    def _within(self, name: str, node: ast.AST) -> None:
        self._around.append(name)
        self.generic_visit(node)
        self._around.pop()

    def _take(self, line: int, text: str) -> None:
        words = _WORD.findall(text)
        kind = self._kind()
        nearest = self._around[-1] if self._around else ""
        alone = nearest in _ON_SCREEN or nearest.removesuffix("=") in _NAMED
        is_phrase = len(words) > 1 and " " in text.strip()
        if not words or _CODE.search(text) or not (is_phrase or (alone and kind)):
            return
        self._keep(line, kind or "text", text)

    def _kind(self) -> str:
        around = set(self._around)
        if around & _HELP_CALLS:
            return "help"
        if "log" in around:
            return "log"
        by_place = next((kind for kind, place in _KINDS if place in self._file), "")
        is_error = "raise" in around or any(name.endswith(("Error", "Refusal")) for name in around)
        return "error" if is_error else by_place or ("error" if around & {"reason=", "why="} else "")

    def _keep(self, line: int, kind: str, text: str) -> None:
        self._found.append(Text(self._file, line, kind, " ".join(text.split())))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


# ---------------------------------------------------------------- the pages


def _of_page(file: str, page: str) -> Iterator[Text]:
    """Paragraphs, list items, headings and rows of tables, without code."""
    kept: list[str] = []
    begun, in_code = 0, False
    for number, row in enumerate([*page.splitlines(), ""], 1):
        if row.lstrip().startswith("```"):
            in_code = not in_code
        starts_anew = not row.strip() or row.lstrip().startswith(("```", "#", "- ", "|", "* "))
        if kept and (starts_anew or in_code):
            yield Text(file, begun, "page", " ".join(" ".join(kept).split()))
            kept = []
        if not in_code and _WORD.search(row) and not row.lstrip().startswith("```"):
            begun = begun if kept else number
            kept.append(row)


def main() -> int:
    parser = argparse.ArgumentParser(description="List every text that a person reads.")
    parser.add_argument(
        "--kind", help="only this kind: help, error, event, alert, dialog, screen, doctor, report, log, page"
    )
    parser.add_argument("--draw", type=int, metavar="N", help="draw so many at random")
    parser.add_argument("--seed", type=int, default=1, help="of the draw")
    given = parser.parse_args()
    found = [text for text in all_texts() if given.kind in (None, text.kind)]
    if given.draw is not None:
        found = [*{text.words: text for text in found}.values()]  # the heads of tables are many
        found = random.Random(given.seed).sample(found, min(given.draw, len(found)))
    for text in found:
        print(f"{text.file}:{text.line}\t{text.kind}\t{text.words}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
