"""`trainctl help`: the pages of docs, from a checkout and from the wheel."""

import zipfile
from io import BytesIO
from pathlib import Path

from tests.tui.support.cli_calls import assert_one_line, call

from trainctl.tui.setup import remote_install

DOCS = Path(__file__).resolve().parents[3] / "docs"


def test_each_page_is_a_topic_that_prints_it() -> None:
    topics = {line.split()[0] for line in call("help").stdout.splitlines()[1:]}
    assert topics == {page.stem for page in DOCS.glob("*.md")} - {"README", "protocol-agents"}
    done = call("help", "training")
    assert (done.returncode, done.stdout) == (0, (DOCS / "training.md").read_text("utf-8"))
    assert_one_line(call("help", "trianing"), 2, "no topic 'trianing'; the topics are ")


def test_the_program_s_wheel_has_the_pages() -> None:
    names = zipfile.ZipFile(BytesIO(remote_install.build_wheel().body)).namelist()
    assert {f"trainctl/tui/docs/{page.name}" for page in DOCS.glob("*.md")} <= set(names)
