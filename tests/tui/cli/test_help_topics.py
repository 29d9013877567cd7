"""`trainctl help`: topics, pages and what is said of others."""

import zipfile
from io import BytesIO
from pathlib import Path

from tests.tui.support.cli_calls import assert_one_line, call

from trainctl.tui.setup import docs_pages, wheel

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_every_page_is_a_topic_with_a_line_about_it() -> None:
    done = call("help")
    assert (done.returncode, done.stderr) == (0, "")
    topics = {line.split()[0] for line in done.stdout.splitlines()[1:]}
    assert topics == {page.stem for page in DOCS.glob("*.md")} - {"README", "protocol-agents"}
    assert all(page.about and "](" not in page.about for page in docs_pages.pages().values())


def test_a_topic_prints_its_page() -> None:
    done = call("help", "training")
    assert (done.returncode, done.stdout) == (0, (DOCS / "training.md").read_text("utf-8"))


def test_an_unknown_topic_is_one_line() -> None:
    assert_one_line(call("help", "rnus"), 2, "no topic 'rnus'; the topics are training, data")


def test_the_program_s_wheel_has_the_pages() -> None:
    names = zipfile.ZipFile(BytesIO(wheel.build()[-1].body)).namelist()
    assert {f"trainctl/tui/docs/{page.name}" for page in DOCS.glob("*.md")} <= set(names)
