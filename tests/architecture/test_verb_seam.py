"""A verb is added in three files and then works everywhere: shown with a patch that adds one, on a copy of the tree."""

from pathlib import Path

import pytest
from tests.architecture.patched_tree import PATCHES, ROOMS, patched, run_in, touched

from trainctl.protocol.messages import verbs
from trainctl.tui.commands import verb_registry

PATCH = PATCHES / "new_verb.patch"
HANDLERS = "node_agent/trainctl/node_agent/planning/edits.py"
MOST_FILES = 4
"""Product files that a new verb may touch."""


def test_a_new_verb_touches_few_files() -> None:
    files = touched(PATCH)
    assert len(files) <= MOST_FILES
    assert all(name.split("/")[0] in ROOMS for name in files), "the rest is generated or found by itself"


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_a_new_verb_works_wherever_verbs_do(tmp_path: Path) -> None:
    done = run_in(patched(PATCH, tmp_path), "-m", "tests.architecture.new_verb_walk")
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["walked"]), done.stdout + done.stderr


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_the_pages_of_a_new_verb_are_made_by_their_commands(tmp_path: Path) -> None:
    tree = patched(PATCH, tmp_path)
    for module, page in (
        ("tools.protocol_docs.docs", "docs/protocol.md"), ("tools.protocol_docs.schema", "docs/protocol.schema.json"),
        ("tools.keys_page", "docs/keys.md"),
    ):  # fmt: skip
        stale = run_in(tree, "-m", module, "--check", page)
        assert (stale.returncode, "is out of date" in stale.stderr) == (1, True), stale.stderr
        assert run_in(tree, "-m", module, page).returncode == 0
        assert "follow-schedule" in (tree / page).read_text("utf-8")


@pytest.mark.tier("soak")
@pytest.mark.needs("git")  # it applies the patch
def test_a_verb_without_a_handler_fails_the_type_check(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    folders = "protocol/trainctl/protocol/messages", "node_agent/trainctl/node_agent/planning"
    tree = patched(PATCH, tmp_path, without=HANDLERS)
    done = run_in(tree, "-m", "mypy", *folders)
    assert 'Argument 1 to "assert_never" has incompatible type "FollowSchedule"' in done.stdout, done.stdout


# ---------------------------------------------------------------- the verbs there are


@pytest.mark.parametrize("name", verbs.VERBS)
def test_declaration_and_description_agree(name: str) -> None:
    verb, described = verbs.VERBS[name], verb_registry.of(name)
    assert (verb.inverse is not None) == callable(described.undo), "what undoes it, or in words why nothing does"
    assert verb.inverse is None or verb.inverse in verbs.VERBS
    assert bool(verb.knobs) == (verb.scope == "edit"), "an edit changes settings of the plan, and nothing else does"
    assert verb.affects == "nothing" or verb.scope == "edit" or verb.args is verbs.Rollback
    assert verb.takes_node or not (verb.needs_node or verb.to_node)


@pytest.mark.parametrize("name", [name for name, verb in verbs.VERBS.items() if verb.inverse and verb.knobs])
def test_what_undoes_an_edit_changes_the_same_settings(name: str) -> None:
    verb = verbs.VERBS[name]
    assert verb.inverse is not None
    assert verbs.VERBS[verb.inverse].knobs & verb.knobs
