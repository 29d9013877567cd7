"""`trainctl diff`: planted differences are found, each with its step, and nothing else is."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.tui.support import reported_runs
from tests.tui.support.cli_calls import assert_one_line, call, call_json
from tests.tui.support.reported_runs import STEPS, copied, with_sql

from trainctl.protocol.record.paths import RunPaths

PARTS = ("recipe", "data", "versions", "plans")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reported_runs.make(tmp_path_factory.mktemp("compared"))


def compared(one: Path, other: Path) -> dict[str, Any]:
    """The object for a script; the exit code says the same."""
    done = call("diff", one, other, "--json")
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["ok"] is True
    assert done.returncode == (0 if found["same"] else 1)
    return found


def differing(found: dict[str, Any]) -> set[str]:
    """The parts that differ."""
    curve = {"curve"} if found["curve"]["first"] or found["curve"]["only_a"] or found["curve"]["only_b"] else set()
    return {part for part in PARTS if found[part]} | curve


def test_a_run_is_the_same_as_its_copy(directory: Path) -> None:
    copy = copied(directory, "copy-1", lambda paths: None)
    found = compared(directory, copy)
    assert found["same"] and differing(found) == set() and found["curve"]["common_steps"] == STEPS
    assert "nothing differs: the losses of 120 steps are the same bit for bit" in call("diff", directory, copy).stdout


def plant_seed(paths: RunPaths) -> None:
    text = paths.run_file.read_text("utf-8")
    paths.run_file.write_text(text.replace('name = "try"', 'name = "try"\nseed = 5'), "utf-8")
    with_sql("UPDATE steps SET loss = loss * 1.5")(paths)


def plant_row(paths: RunPaths) -> None:
    state = paths.checkpoint(STEPS) / "state.json"
    state.write_text(json.dumps({"samples": 512, "data_digest": "cd" * 32, "seed": 0}), "utf-8")
    with_sql(
        "UPDATE steps SET loss = loss + 1e-6 WHERE step >= 31", "UPDATE steps SET loss = loss + 1 WHERE step = 40"
    )(paths)


def plant_version(paths: RunPaths) -> None:
    manifest = paths.checkpoint(STEPS) / "manifest.json"
    manifest.write_text(manifest.read_text("utf-8").replace("torch 2.9.1", "torch 2.9.2"), "utf-8")


def plant_rebalance(paths: RunPaths) -> None:
    with_sql(
        "UPDATE steps SET plan_version = plan_version + 1, loss = loss * (1 + 1e-15) WHERE step >= 70",
        "UPDATE rank_steps SET samples = samples + 1 WHERE step >= 70 AND rank = 0",
        "UPDATE rank_steps SET samples = samples - 1 WHERE step >= 70 AND rank = 1",
    )(paths)


PLANTED: dict[str, tuple[Callable[[RunPaths], None], set[str], int | None, str]] = {
    "seed": (plant_seed, {"recipe", "curve"}, 1, "run.seed: 0 → 5"),
    "row": (plant_row, {"data", "curve"}, 31, f"digest: {reported_runs.DIGEST} → {'cd' * 32}"),
    "version": (plant_version, {"versions"}, None, "library on a: torch 2.9.1 → torch 2.9.2"),
    "rebalance": (plant_rebalance, {"plans", "curve"}, 70, "step 70, shares: a 5, b 3, c 4 → a 6, b 2, c 4"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_with_its_step(directory: Path, name: str) -> None:
    change, parts, step, says = PLANTED[name]
    other = copied(directory, f"{name}-1", change)
    found = compared(directory, other)
    assert differing(found) == parts
    first = found["curve"]["first"]
    assert (first["step"] if first else None) == step
    text = call("diff", directory, other).stdout
    assert says in text
    if step is not None:
        assert f"the losses part at step {step}: " in text
        assert first["difference"] > 0 and first["relative"] > 0


def test_a_branch_differs_only_from_its_first_step_on(directory: Path) -> None:
    before = ("DELETE FROM steps WHERE step < 60", "DELETE FROM rank_steps WHERE step < 60")
    branch = copied(directory, "branch-1", with_sql(*before))
    found = compared(directory, branch)
    assert found["same"] and differing(found) == set()
    assert (found["curve"]["begins"], found["curve"]["common_steps"]) == (60, STEPS - 59)
    moved = copied(branch, "branch-2", plant_rebalance)
    assert [one["step"] for one in compared(directory, moved)["plans"]] == [70]


def test_losses_that_are_no_numbers(directory: Path) -> None:
    """A NaN is like another NaN, and unlike a number; so is a step that one run lacks."""
    one = copied(directory, "nan-1", with_sql("UPDATE steps SET loss = NULL WHERE step = 9"))
    other = copied(directory, "nan-2", with_sql("UPDATE steps SET loss = NULL WHERE step = 9"))
    assert compared(one, other)["same"]
    first = compared(directory, one)["curve"]["first"]
    assert (first["step"], first["b"], first["difference"]) == (9, "NaN", None)
    short = copied(directory, "short-1", with_sql("UPDATE steps SET retracted = 1 WHERE step > 100"))
    found = compared(short, directory)
    assert not found["same"] and found["curve"]["only_b"] == STEPS - 100 and found["curve"]["first"] is None


def test_runs_without_a_step_have_nothing_to_compare(directory: Path) -> None:
    none = [copied(directory, name, with_sql("UPDATE steps SET retracted = 1")) for name in ("none-1", "none-2")]
    said = call("diff", *none).stdout
    assert "neither run has a step to compare" in said and "nothing differs" not in said
    assert "the runs have no step in common" in call("diff", none[0], directory).stdout


def test_what_isnt_recorded_is_unknown_and_no_difference(directory: Path) -> None:
    def forget(paths: RunPaths) -> None:
        (paths.checkpoint(STEPS) / "manifest.json").unlink()
        (paths.checkpoint(STEPS) / "state.json").unlink()

    found = compared(directory, copied(directory, "bare-1", forget))
    assert found["same"]
    assert any("the data of b" in text for text in found["unknown"])
    assert any("library on a: only a has it" in text for text in found["unknown"])


def test_a_run_that_isnt_there_is_one_line(directory: Path, tmp_path: Path) -> None:
    assert_one_line(call("diff", directory, tmp_path), 2, str(tmp_path), "record.db")
    refused = call_json("diff", directory, tmp_path / "gone", status=2)
    assert refused["error"]["code"] == "invalid-input"
