"""Every link of the README and the docs leads somewhere, and every picture in their folder is shown."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest
from tools.protocol_docs import docs

from tools import pictures

ROOT = Path(__file__).resolve().parents[2]
DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS


def links(text: str) -> list[str]:
    """Where the links of a page lead, those outside of the repository left out."""
    found = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [link for link in found if not re.match(r"\w+:", link)]


def leads(page: Path, link: str) -> bool:
    """Whether a page's link names a file of the repository, and a heading in it if it names one."""
    name, _, anchor = unquote(link).partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return False
    return not anchor or anchor in docs.anchors(file.read_text("utf-8"))


def test_every_link_leads_somewhere() -> None:
    dead = [
        f"{page.name}: {link}" for page in PAGES for link in links(page.read_text("utf-8")) if not leads(page, link)
    ]
    assert dead == []


@pytest.mark.parametrize("link", ["gone.md", "README.md#no-such-heading", "#no-such-heading", "../elsewhere.md"])
def test_a_link_that_leads_nowhere_is_found(link: str) -> None:
    assert not leads(ROOT / "README.md", link)


def test_the_index_names_every_page() -> None:
    assert {page.name for page in DOCS} - set(links((ROOT / "docs" / "README.md").read_text("utf-8"))) == {"README.md"}


def test_the_readme_leads_to_the_index() -> None:
    assert "docs/README.md" in links((ROOT / "README.md").read_text("utf-8"))


def test_every_picture_is_shown_and_kept_in_one_folder() -> None:
    shown = {
        (page.parent / link).resolve() for page in PAGES for link in links(page.read_text("utf-8")) if ".svg" in link
    }
    assert shown == set(pictures.FOLDER.glob("*"))
