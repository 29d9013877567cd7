"""The pages of the documentation: beside the program in an installed package, at the root of a checkout."""

import re
from pathlib import Path
from typing import NamedTuple

from trainctl.protocol.errors import InvalidInputError

INSTALLED = "docs"
"""The folder in this package that the wheel puts the pages into."""
_INDEX = "README.md"
"""The page that lists the others with a line about each."""
_ROW = re.compile(r"^\| \[([a-z-]+)\.md\]\(\1\.md\) \| (.+) \|$", re.MULTILINE)
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Page(NamedTuple):
    """One page: its topic, what it is about, and its file in Markdown."""

    topic: str
    about: str
    path: Path


def folder() -> Path:
    """The folder of the pages. Raises InvalidInputError if the installation has none."""
    package = Path(__file__).resolve().parents[1]
    for found in (package / INSTALLED, package.parents[2] / "docs"):
        if (found / _INDEX).is_file():
            return found
    raise InvalidInputError("help", "the documentation isn't installed: reinstall trainctl with pip")


def pages() -> dict[str, Page]:
    """The pages by topic, in the order of the index. Raises InvalidInputError if the installation has none."""
    place = folder()
    rows = _ROW.findall((place / _INDEX).read_text("utf-8"))
    return {
        topic: Page(topic, _LINK.sub(r"\1", about).replace("`", ""), place / f"{topic}.md") for topic, about in rows
    }


def files() -> list[Path]:
    """Every file that an installation needs for its help: the index and the pages."""
    return sorted(folder().glob("*.md"))
