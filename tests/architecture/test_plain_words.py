"""Plain English: words that native speakers stumble over stand nowhere in the program, its tests or its pages."""

import re
from pathlib import Path

import pytest

from tools import user_strings

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "node_agent", "protocol", "tests", "tools", "trainer", "tui")
KINDS = (".py", ".md", ".toml", ".mjs")
PLAINER = {
    r"mend(s|ed|ing)?": "fix",
    r"heed(s|ed|ing)?": "obey",
    r"be it": "even if, or nothing",
    r"(told|tells?) of": "reported, given",
    r"for want of": "for lack of",
    r"gone on with": "continued",
}
"""Each with what to write instead."""
PLAINER_TEXT = {
    r"told|tells": "reported, said, known",
    r"conduct(s|ed|ing)?": "lead",
    r"(take|takes|taken|took) up": "resume",
    r"gets? on with": "makes no progress",
    r"so already": "already set",
    r"by now": "already, or nothing",
    r"as (they|it) counts?": "effective",
    r"for certain": "certainly",
    r"in the place of": "instead of",
    r"anew": "again",
    r"nobody": "no one, or say it of the thing",
    r"can be had|be had": "is available",
    r"what is (so|not so)": "say what",
    r"further words": "extra arguments",
    r"sees? to": "handle",
    r"comes? to be": "becomes",
    r"is to be": "must be",
}
"""The same for texts that the program's users read."""
ODD = re.compile(rf"(?<![a-z])({'|'.join(PLAINER)})(?![a-z])".replace(" ", r"\s+"), re.IGNORECASE)
QUOTED = ("tests/golden/", "tests/architecture/test_plain_words.py")
"""Frozen files, and this list."""


def texts() -> list[Path]:
    found = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in KINDS]
    found += [path for path in ROOT.iterdir() if path.suffix in KINDS or path.name == "Makefile"]
    names = {path: path.relative_to(ROOT).as_posix() for path in found}
    return [path for path, name in names.items() if not name.startswith(QUOTED) and "node_modules" not in name]


def odd_words(text: str) -> list[str]:
    """Each with its line; they are found across the end of a line too."""
    joined = re.sub(r"\s*\n\s*(#\s)?", lambda gap: " " * len(gap[0]), text)
    return [f"{text.count(chr(10), 0, found.start()) + 1}: {found[0]}" for found in ODD.finditer(joined)]


def test_what_users_read_is_in_plain_words() -> None:
    odd = re.compile(rf"\b({'|'.join(PLAINER_TEXT)})\b", re.IGNORECASE)
    found = [text for text in user_strings.all_texts() if odd.search(text.words)]
    assert [f"{text.file}:{text.line}: {text.words}" for text in found] == [], f"write {PLAINER_TEXT}"


@pytest.mark.parametrize(
    "text", ["he mended it", "# be it", "for want\n    # of memory", "It tells of a step", "def heed_it():"]
)
def test_odd_words_are_found(text: str) -> None:
    assert odd_words(text)


def test_texts_are_in_plain_words() -> None:
    found = [f"{path.relative_to(ROOT)}:{odd}" for path in texts() for odd in odd_words(path.read_text("utf-8"))]
    assert found == [], f"write {PLAINER}"
