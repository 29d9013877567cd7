"""Every link of the README and the docs leads somewhere, and every picture in their folder is shown."""

import re
from pathlib import Path
from urllib.parse import unquote

from tests.conftest import ROOT
from tools.protocol_docs import docs

from tools import pages

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")] + DOCS


def links(page: Path) -> list[str]:
    """Return where the links of a page lead, those outside of the repository left out."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"\w+:", link)]


def leads(page: Path, link: str) -> bool:
    """Return whether a page's link names a file of the repository, and a heading in it if it names one."""
    name, _, anchor = unquote(link).partition("#")
    file = (page.parent / name).resolve() if name else page
    if not file.is_relative_to(ROOT) or not file.exists():
        return False
    return not anchor or anchor in docs.anchors(file.read_text("utf-8"))


def test_every_link_leads_somewhere_and_every_page_is_in_the_index() -> None:
    assert [f"{page.name}: {link}" for page in PAGES for link in links(page) if not leads(page, link)] == []
    assert {page.name for page in DOCS} - set(links(ROOT / "docs" / "README.md")) == {"README.md"}
    assert "docs/README.md" in links(ROOT / "README.md")


def test_every_picture_is_shown_and_kept_in_one_folder() -> None:
    shown = {(page.parent / link).resolve() for page in PAGES for link in links(page) if ".svg" in link}
    assert shown == set(pages.PICTURES.glob("*"))
