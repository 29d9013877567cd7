"""The list of what a person reads is complete: one planted text of each kind is found, and all that `--help` prints."""

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import typer

from tools import user_strings
from trainctl.node_agent.cli import app as agent_app
from trainctl.tui.cli.main import app

PLANTED = {
    "tui/a/cli/one.py": (
        ("help", "Does the planted thing."),
        ("help", "How planted it is."),
        '''
import typer
from typing import Annotated

def command(far: Annotated[int, typer.Option(help="How planted it is.")]) -> None:
    """Does the planted thing."""
''',
    ),
    "node_agent/b/error.py": (
        ("error", "planted value … is too large"),
        '''
"""Not a person's: the docstring of a module."""
LIMIT = 3
"""Not a person's: the note on a constant."""

def check(value: int) -> None:
    """Not a person's: the docstring of a function."""
    if value > LIMIT:
        raise InvalidInputError("value", f"planted value {value:,} is too large")
    cursor.execute("SELECT planted FROM values WHERE 1")
''',
    ),
    "protocol/trainctl/protocol/messages/event_prose.py": (
        ("event", "planted the … away"),
        'def text(data):\n    return f"planted the {data.node} away"\n',
    ),
    "node_agent/trainctl/node_agent/alerts/x.py": (("alert", "planted disk full"), 'FOUND = "planted disk full"\n'),
    "tui/trainctl/tui/dialogs/x.py": (("dialog", "planted?"), 'made = Field(title="planted?")\n'),
    "tui/trainctl/tui/screens/x.py": (("screen", "planted"), 'made = Piece("planted", "strong")\n'),
    "tui/trainctl/tui/doctor/x.py": (("doctor", "plant it anew"), 'hint = "plant it anew"\n'),
    "trainer/x.py": (("log", "planted and running"), 'log.info("planted and running")\n'),
    "tui/trainctl/tui/hints.py": (("text", "next, plant another"), 'HINT = "next, plant another"\n'),
    "README.md": (
        ("page", "# A planted heading"),
        ("page", "A planted paragraph goes on."),
        ("page", "- a planted item"),
        ("page", "| planted | row |"),
        "# A planted heading\n\nA planted paragraph\ngoes on.\n\n- a planted item\n\n| planted | row |\n\n"
        "```\nplanted code\n```\n",
    ),
}  # fmt: skip


def test_one_of_each_kind_is_found_and_nothing_else(tmp_path: Path) -> None:
    wanted = set()
    for name, (*texts, content) in PLANTED.items():
        file = tmp_path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(content), "utf-8")
        wanted |= {(name, *text) for text in texts}
    assert {(text.file, text.kind, text.words) for text in user_strings.all_texts(tmp_path)} == wanted


LIBRARY = {"install_completion", "show_completion", "help"}
"""Options whose help the library writes."""


def helps(command: Any) -> list[str]:
    """Of a command, its options and arguments, and its subcommands."""
    own = [param for param in command.params if param.name not in LIBRARY]
    found = [command.help or "", *(getattr(param, "help", None) or "" for param in own)]
    for inner in getattr(command, "commands", {}).values():
        found += helps(inner)
    return found


@functools.cache
def listed() -> set[str]:
    """What the list has of help and other texts."""
    return {text.words for text in user_strings.all_texts() if text.kind in ("help", "text")}


def split_at_gaps(text: str) -> list[str]:
    return text.split(user_strings.GAP)


@pytest.mark.parametrize("program", [app, agent_app], ids=["trainctl", "trainctl-agent"])
def test_all_that_help_prints_is_listed(program: typer.Typer) -> None:
    texts = listed()
    patterns = [re.compile(".*?".join(map(re.escape, parts))) for parts in map(split_at_gaps, texts) if len(parts) > 1]
    for said in filter(None, helps(typer.main.get_command(program))):
        words = " ".join(said.split())
        assert words in texts or any(pattern.fullmatch(words) for pattern in patterns), words
