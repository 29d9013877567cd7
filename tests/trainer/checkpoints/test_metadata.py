"""What a checkpoint's manifest says of its run."""

import json
from pathlib import Path
from typing import Any

import msgspec
from tests.trainer.support.savers import MICRO, saver_of

from trainctl.node_agent.records.run_db import RunDb
from trainctl.protocol.config import run_file
from trainctl.protocol.messages.events import NoteWritten, RunBranched
from trainctl.protocol.record.checkpoints import MANIFEST_NAME, ParentCheckpoint, read_manifest
from trainctl.protocol.record.paths import RunPaths
from trainctl.trainer.checkpoints.saver import parent_by, read_record, recipe_of


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
