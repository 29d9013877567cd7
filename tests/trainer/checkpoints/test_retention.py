"""Tests of which checkpoints stay, which is the best, and what a manifest says of its run."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.savers import MICRO, saver_of
from tests.trainer.support.trained_run import TrainedRun

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.config import run_file
from trainctl.protocol.messages.events import NoteWritten, RunBranched
from trainctl.protocol.record import checkpoints
from trainctl.protocol.record.checkpoints import (
    MANIFEST_NAME,
    ParentCheckpoint,
    best_checkpoint,
    best_step,
    listed,
    read_manifest,
)
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.rollups import Evaluation
from trainctl.trainer.checkpoints.files import prune, spare
from trainctl.trainer.checkpoints.saver import parent_by, read_record, recipe_of


@pytest.mark.parametrize(("keep_last", "keep_every", "kept", "left"), [
    (2, 30, [10], [10, 30, 50, 60]), (9, 0, [], [10, 20, 30, 40, 50, 60]), (1, 25, [], [30, 50, 60]),
])  # fmt: skip
def test_the_last_those_of_every_and_the_best_stay(keep_last, keep_every, kept, left):
    gone = spare([10, 20, 30, 40, 50, 60], keep_last, keep_every, kept)
    assert [step for step in (10, 20, 30, 40, 50, 60) if step not in gone] == left


def pruned(steps, keep_last, keep_every):
    """After each of the checkpoints: all that were written, and those that stay."""
    written, there = list[int](), list[int]()
    for step in sorted(steps):
        written, there = [*written, step], [*there, step]
        gone = spare(there, keep_last, keep_every, [])
        there = [one for one in there if one not in gone]
        yield written, there


def test_those_that_a_write_before_them_has_delayed_are_kept_too():
    """A write takes 250 steps, and one is due each 100: none but the first is of a step that `keep_every` divides."""
    *_, (_, there) = pruned(range(100, 4000, 250), 1, 1000)
    assert there == [1100, 2100, 3100, 3850]


@given(steps=st.sets(st.integers(1, 200), min_size=1), keep_last=st.integers(1, 3), keep_every=st.integers(1, 60))
def test_the_first_one_at_or_after_each_multiple_stays(steps, keep_last, keep_every):
    for written, there in pruned(steps, keep_last, keep_every):
        multiples = range(keep_every, written[-1] + 1, keep_every)
        first = {next(step for step in written if step >= multiple) for multiple in multiples}
        assert there == sorted(first | set(written[-keep_last:]))


def test_one_that_cannot_be_removed_keeps_no_other_one(tmp_path, monkeypatch):
    for step in range(1, 6):
        (tmp_path / f"step-{step}").mkdir()
    rename = Path.rename

    def renamed(path, target):
        if path.name == "step-2":
            raise PermissionError("not permitted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    with pytest.raises(PermissionError):
        prune(tmp_path, 2, [])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-2", "step-4", "step-5"]


def test_a_checkpoint_is_complete_though_older_ones_cannot_be_removed(chat_model, tmp_path, monkeypatch):
    lora, table = {"kind": "lora", "rank": 2}, {"keep_last": 1}
    run = TrainedRun(tmp_path / "runs" / "run-1", chat_model, "mlx", lora, steps=2, saved=(1,), checkpoint=table)
    rmtree = shutil.rmtree

    def refused(path, ignore_errors=False):
        if str(path).endswith(".gone") and not ignore_errors:
            raise PermissionError("Operation not permitted: 'model.safetensors'")
        rmtree(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", refused)
    info = run._saver.write()
    assert (info.step, info.unpruned) == (2, "Operation not permitted: 'model.safetensors'")
    assert info.kept == (2,)
    assert checkpoints.verify(Path(info.path)).step == 2


NAN = float("nan")


def evaluated(**losses):
    return [Evaluation(int(step[1:]), 0.0, loss, 1.0, 1.0) for step, loss in losses.items()]


@pytest.mark.parametrize(("losses", "best"), [
    ({}, None), ({"s5": 1.0}, None), ({"s2": NAN}, None), ({"s1": 2.0, "s2": 1.0, "s5": 0.5}, 2),
    ({"s1": 1.0, "s2": 1.0, "s4": NAN}, 2), ({"s2": 1.0, "s3": 0.5}, 4), ({"s2": 1.0, "s3": 0.5, "s4": 2.0}, 2),
    ({"s1": 1.0, "s3": 0.5, "s4": NAN}, 1),
])  # fmt: skip
def test_the_best_is_the_kept_step_with_the_lowest_finite_loss(losses, best):
    assert best_step([1, 2, 4], evaluated(**losses)) == best


@given(
    steps=st.sets(st.integers(1, 40), min_size=1), keep_last=st.integers(1, 3),
    losses=st.dictionaries(st.integers(1, 40), st.sampled_from([1.0, 2.0, 3.0, NAN])),
)  # fmt: skip
def test_removing_others_makes_none_the_best(steps, keep_last, losses):
    written, there = list[int](), list[int]()
    for step in sorted(steps):
        best = best_step(there, evaluated(**{f"s{at}": loss for at, loss in losses.items() if at < step}))
        gone = spare([*there, step], keep_last, 0, [best] if best is not None else [])
        written, there = [*written, step], [one for one in [*there, step] if one not in gone]
        known = evaluated(**{f"s{at}": loss for at, loss in losses.items() if at <= step})
        assert best_step(there, known) == best_step(written, known)


@pytest.fixture
def trained(tmp_path, chat_model):
    lora = {"kind": "lora", "rank": 2}
    return lambda **changes: TrainedRun(tmp_path / "runs" / "run-1", chat_model, "torch", lora, **changes)


def test_the_best_is_kept_though_each_checkpoint_is_later_than_its_evaluation(trained):
    run = trained(steps=6, saved=(2, 4, 6), held_out={1: 1.0, 3: 2.0, 5: 3.0}, checkpoint={"keep_last": 1})
    assert [folder.name for folder in listed(run.paths.checkpoints)] == ["step-6", "step-2"]


@pytest.mark.parametrize(("keep_best", "steps"), [(True, [6, 5, 2]), (False, [6, 5])])
def test_the_best_is_kept_beside_the_last(trained, keep_best, steps):
    """Step 2 is best until the end; step 1 was until step 2, and step 4's lower loss has no checkpoint.
    Step 5 has a loss of its own, which comes after it."""
    losses, table = {1: 3.0, 2: 1.0, 3: 2.0, 4: 0.5, 5: 2.5}, {"keep_last": 2, "keep_best": keep_best}
    run = trained(steps=6, saved=(1, 2, 3, 5, 6), held_out=losses, checkpoint=table)
    assert [int(folder.name.removeprefix("step-")) for folder in listed(run.paths.checkpoints)] == steps
    best = best_checkpoint(run.paths)
    assert best is not None and best.name == ("step-2" if keep_best else "step-5")
    run.paths.record.unlink()
    assert best_checkpoint(run.paths) is None


def test_the_recipe_has_everything_but_the_environment_of_nodes():
    """It may hold keys of other services, and a checkpoint is given away."""
    raw = {
        "run": {"name": "r", "steps": 5}, "model": {"path": "/m"}, "data": {"path": "/d"}, "batch": {"global": 8},
        "optimizer": {"learning_rate": 1e-3},
        "nodes": {"a": {"backend": "torch", "env": {"HF_TOKEN": "hf_secret"}}},
    }  # fmt: skip
    config = run_file.parse(raw)
    recipe = recipe_of(config)
    assert "hf_secret" not in repr(recipe)
    assert recipe["nodes"]["a"]["backend"] == "torch"
    assert config.nodes["a"].env == {"HF_TOKEN": "hf_secret"}, "the run still has it"


def parent_in(folder):
    about = read_manifest(Path(folder)).metadata
    return about.lineage.parent


def test_a_branch_s_checkpoints_name_its_parent_also_once_it_is_resumed(new_rig, tmp_path):
    first = new_rig("torch")
    first.train(1, MICRO)
    written = saver_of(first, RunPaths(tmp_path / "parent")).write()
    assert parent_in(written.path) is None
    manifest = Path(written.path, MANIFEST_NAME)
    renamed = msgspec.structs.replace(read_manifest(manifest.parent), run="parent")  # the savers here are of run r
    manifest.write_bytes(msgspec.json.encode(renamed))
    folder = manifest.parent
    for step in (2, 3):  # the branch, and its own resumption
        rig = new_rig("torch")
        saver = saver_of(rig, RunPaths(tmp_path / "branch"))
        saver.resume(folder)
        rig.train(step, MICRO)
        folder = Path(saver.write().path)
        assert parent_in(str(folder)) == ParentCheckpoint("parent", 1)


def test_a_rank_that_loaded_no_checkpoint_finds_the_parent_in_its_copy_of_the_record(tmp_path):
    paths = RunPaths(tmp_path / "branch")
    assert read_record(paths, "branch", 9)[1] is None, "it has no record"
    paths.directory.mkdir()
    with RunDb(paths) as recorder:
        recorder.event(1.0, NoteWritten("first"), "info", "anna")
        recorder.event(2.0, RunBranched("branch", 3, "another", "a"), "info", "anna", step=3)
        assert read_record(paths, "branch", 9)[1] is None
        recorder.event(3.0, RunBranched("parent", 7, "branch", "a"), "info", "anna", step=7)
    assert read_record(paths, "branch", 9)[1] == ParentCheckpoint("parent", 7)


def test_a_manifest_of_0_2_0_still_loads_without_a_parent(tmp_path):
    raw: dict[str, Any] = {
        "format": 1, "run": "r", "step": 4, "written_at": 1.5, "files": {}, "compute": None,
        "metadata": {
            "recipe": {}, "performance": {"loss": 2.5},
            "lineage": {"run": "r", "resumed_from": 2, "generation": [1, 2]},
            "environment": {
                "node": "a", "program": "0.2.0", "python": "3.11.2", "library": "torch 2.9.1", "device": "cpu",
                "system": "Linux x86_64",
            },
        },
    }  # fmt: skip
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(raw), "utf-8")
    manifest = read_manifest(tmp_path)
    assert parent_by(manifest, "r") is None
    assert parent_by(manifest, "branch") == ParentCheckpoint("r", 4)
