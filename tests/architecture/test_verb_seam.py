"""A verb is added in three files and then works everywhere: shown with a patch that adds one, on a copy of the tree."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.waiting import HANG_SECONDS

from trainctl.protocol.messages import verbs
from trainctl.tui.commands import verb_registry

ROOMS = ("protocol", "trainer", "node_agent", "tui")
PATCH = Path(__file__).parent / "patches" / "new_verb.patch"
HANDLERS = "node_agent/trainctl/node_agent/planning/edits.py"
MOST_FILES = 4
"""Product files that a new verb may touch."""


def patched(into: Path, *options: str) -> Path:
    """Copy the product, its tools, its pages and what these are made of, and apply the patch."""
    ignored = shutil.ignore_patterns("__pycache__")
    for name in (*ROOMS, "tools", "docs", "tests/golden", "tests/tui/screens/__snapshots__"):
        shutil.copytree(ROOT / name, into / name, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", into)
    words = ["git", "apply", "-C1", *options, str(PATCH)]
    done = subprocess.run(words, cwd=into, capture_output=True, text=True, timeout=HANG_SECONDS, check=False)
    assert done.returncode == 0, f"{PATCH.name} no longer fits the code; make it again with git diff\n{done.stderr}"
    return into


def run_in(tree: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run `python WORDS` in the copy, whose product comes before that of the checkout."""
    paths = [*(str(tree / room) for room in ROOMS), str(tree), str(ROOT)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=HANG_SECONDS
    )


def test_a_new_verb_touches_few_files() -> None:
    files = re.findall(r"^\+\+\+ b/(\S+)", PATCH.read_text("utf-8"), flags=re.MULTILINE)
    assert len(files) <= MOST_FILES
    assert all(name.split("/")[0] in ROOMS for name in files), "the rest is generated or found by itself"


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_a_new_verb_works_wherever_verbs_do_and_its_pages_are_made_by_their_command(tmp_path: Path) -> None:
    tree = patched(tmp_path)
    done = run_in(tree, "-m", "tests.architecture.new_verb_walk")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["walked"]), done.stdout + done.stderr
    stale = run_in(tree, "-m", "tools.pages", "--check")
    pages = [f"docs/{name}" for name in ("protocol.md", "protocol.schema.json", "keys.md")]
    assert [line.split()[0] for line in stale.stderr.splitlines()] == pages, stale.stderr
    assert run_in(tree, "-m", "tools.pages").returncode == 0
    assert all("follow-schedule" in (tree / page).read_text("utf-8") for page in pages)


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_a_verb_without_a_handler_fails_the_type_check(tmp_path: Path) -> None:
    tree = patched(tmp_path, f"--exclude={HANDLERS}")
    done = run_in(tree, "-m", "mypy", "protocol/trainctl/protocol/messages", "node_agent/trainctl/node_agent/planning")
    assert 'Argument 1 to "assert_never" has incompatible type "FollowSchedule"' in done.stdout, done.stdout


@pytest.mark.parametrize("name", verbs.VERBS)
def test_declaration_and_description_agree(name: str) -> None:
    verb, described = verbs.VERBS[name], verb_registry.of(name)
    assert (verb.inverse is not None) == callable(described.undo), "what undoes it, or in words why nothing does"
    assert bool(verb.knobs) == (verb.scope == "edit"), "an edit changes settings of the plan, and nothing else does"
    assert verb.affects == "nothing" or verb.scope == "edit" or verb.args is verbs.Rollback
    assert verb.takes_node or not (verb.needs_node or verb.to_node)
    if verb.inverse is not None:
        assert not verb.knobs or verbs.VERBS[verb.inverse].knobs & verb.knobs
