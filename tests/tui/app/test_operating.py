"""The page for operators holds what is there: its pictures are those that the tests compare, its keys are bound."""

import re
from pathlib import Path
from urllib.parse import unquote

from trainctl.tui.app import keymap

DOCS = Path(__file__).parents[3] / "docs"
PAGE = (DOCS / "operating.md").read_text(encoding="utf-8")


def test_what_it_links_to_is_there() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", PAGE)
    assert len(links) >= 9
    missing = [link for link in links if not (DOCS / unquote(link)).resolve().is_file()]
    assert missing == []


def test_the_keys_of_its_headings_and_tables_are_bound() -> None:
    """A screen's key stands at the head of its part, a dialog's in the first column of a table."""
    named = {
        key for cell in re.findall(r"^\| ((?:`[^`]`\s*)+)\|", PAGE, re.MULTILINE) for key in re.findall("`(.)`", cell)
    }
    named |= set(re.findall(r"^###? .* \(`(.)`\)$", PAGE, re.MULTILINE))
    bindings = (binding for table in keymap.tables().values() for binding in table)
    bound = {keymap.spoken(key.strip()) for binding in bindings for key in binding.key.split(",")} | {":"}
    assert {"0", "1", "2", "3", "4", "5", "a", "b", "s", "l", ":"} <= named
    assert named <= bound
