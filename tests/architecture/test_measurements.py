"""docs/measurements.md has one figure a row, each with the command that measures it, and no row that is long."""

import re

from tests.conftest import ROOT

MOST_CHARACTERS = 240
BY_HAND = "by hand"


def tables() -> list[list[list[str]]]:
    """The page's tables, each as rows of cells, the heading first."""
    text = (ROOT / "docs" / "measurements.md").read_text("utf-8")
    found = re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE)
    return [[[cell.strip() for cell in row[1:-1].split("|")] for row in table.splitlines()] for table in found]


def test_every_row_is_short_and_names_its_command() -> None:
    for heading, _, *rows in tables():
        for row in rows:
            assert len(" | ".join(row)) <= MOST_CHARACTERS, row
            if "command" in heading:
                command = row[heading.index("command")]
                assert command in (BY_HAND, "the same") or re.fullmatch(r"`[^`]+`", command), row
