"""A checkpoint is whole or absent, is refused when torn, and continues a run to the byte."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.trainer.support.library_trainers import library_model
from tests.trainer.support.synced_disk import SyncedDisk
from tests.trainer.support.written_checkpoints import loop_of, write_small

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.record import checkpoints
from trainctl.trainer.checkpoints import files


@pytest.fixture
def small(tmp_path, assets):
    """Write a checkpoint of a model of two numbers, at any step."""
    return lambda step, value=1.0: write_small(tmp_path / "checkpoints", assets / "model", step, value)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_a_checkpoint_is_a_hugging_face_directory(new_rig, tmp_path, backend):
    rig = new_rig(backend)
    rig.train(1, 6)
    folder, batch = tmp_path / "checkpoints" / "step-1", rig.dataset.batch(np.arange(4))
    files.write(folder, "r", loop_of(1), rig.backend.export_state(), Path(rig.config.model.path))
    expected = rig.backend.evaluate(batch).losses["tokens"]
    for name in ("torch", "mlx"):
        again = new_rig(name, model__path=str(folder)).backend
        assert again.evaluate(batch).losses["tokens"] == pytest.approx(expected, rel=1e-5)


def test_a_checkpoint_names_what_it_was_made_of():
    loop = loop_of(3)
    files.check_fits(loop, msgspec.structs.replace(loop, step=7, updates=7), "here", Path(), None)
    for key, value in (("seed", 99), ("samples", 1), ("layout_digest", "x"), ("data_digest", "x")):
        with pytest.raises(InvalidInputError, match=r"^here: the .* differs"):
            files.check_fits(loop, msgspec.structs.replace(loop, **{key: value}), "here", Path(), None)


def test_a_state_of_another_model_is_refused_by_name(new_rig):
    rig = new_rig("torch")
    state = rig.backend.export_state()
    state.weights.pop("model.norm.weight")
    with pytest.raises(InvalidInputError, match=r"weight of 'model\.norm\.weight'"):
        rig.backend.import_state(state)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.parametrize("how", ["missing", "cut", "altered"])
def test_a_torn_checkpoint_is_refused_by_name(small, name, how):
    folder = small(3)
    path = folder / name
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "cut":
        path.write_bytes(content[: len(content) // 2])
    else:
        path.write_bytes(content[:-9] + bytes(255 - byte for byte in content[-9:]))
    with pytest.raises(InvalidInputError, match=r"checkpoint|manifest") as refusal:
        files.read(folder)
    assert name in str(refusal.value)
    assert str(folder) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_the_newest_complete_one_is_found_past_torn_ones(small, tmp_path):
    for step in (1, 2, 10, 11):
        small(step)
    folder = tmp_path / "checkpoints"
    assert checkpoints.newest_complete(folder) == folder / "step-11"
    (folder / "step-11" / "manifest.json").unlink()
    (folder / "step-10" / "model.safetensors").write_bytes(b"")
    shutil.copytree(folder / "step-2", folder / ".step-12.1.part")
    (folder / "step-x").mkdir()
    assert checkpoints.newest_complete(folder) == folder / "step-2"
    assert checkpoints.newest_complete(tmp_path / "nothing") is None


def test_a_write_that_fails_leaves_everything_as_it_was(small, tmp_path, monkeypatch):
    folder = small(1)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def full(path):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "sync", full)
    for step in (1, 2):
        with pytest.raises(OSError, match="No space"):
            small(step)
    assert [path.name for path in folder.parent.iterdir()] == ["step-1"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_those_superseded_stay_so_through_a_power_cut(small, tmp_path):
    for step in (5, 10):
        small(step)
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        checkpoints.supersede(tmp_path / "checkpoints", 5)
    left = disk.moments[-1].after_a_cut("nothing")["checkpoints"]
    assert sorted(left) == ["step-5", "superseded-step-10"]


def test_those_superseded_go_once_the_run_is_as_far_again(small, tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (5, 10, 15):
        small(step)
    checkpoints.supersede(folder, 5)
    for step, left in ((8, ["superseded-step-10", "superseded-step-15"]), (10, ["superseded-step-15"]), (20, [])):
        files.prune(folder, 9, [small(step)])
        assert sorted(path.name for path in folder.glob("superseded-*")) == left


def test_leftovers_of_dead_writers_go_when_older_checkpoints_do(small, tmp_path, dead_pid):
    written, folder = small(3), tmp_path / "checkpoints"
    small(2).rename(folder / f".step-2.{dead_pid}.old")  # killed before the new one had its name
    living = f".step-9.{os.getppid()}.part"
    for name in (f".step-7.{dead_pid}.part", f".step-3.{dead_pid}.old", ".step-1.gone", living):
        (folder / name).mkdir()
        (folder / name / "model.safetensors").write_bytes(b"x")
    files.prune(folder, 2, [written])
    assert sorted(path.name for path in folder.iterdir()) == [living, "step-2", "step-3"]


def test_the_same_checkpoint_written_again_is_left_alone_and_another_one_replaces_it(small):
    folder = small(4)
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    small(4)
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
    (folder / "state.json").write_text("{}", encoding="utf-8")
    small(4, 2.0)
    read = files.read(folder)
    assert (read.loop.step, read.state.weights["w"][0]) == (4, 2.0)
    assert [path.name for path in folder.parent.iterdir()] == ["step-4"]


@pytest.mark.parametrize("refused", ["first rename", "second rename", "sync"])
def test_a_replacement_that_the_disk_refuses_leaves_the_old_one(small, monkeypatch, refused):
    folder = small(4)
    rename, sync, calls = Path.rename, files.sync, []

    def refusing(path, target):
        calls.append(path)
        if len(calls) == {"first rename": 1, "second rename": 2}.get(refused):
            raise OSError(5, "Input/output error")
        return rename(path, target)

    def unsynced(path):
        if path == folder.parent and refused == "sync":
            raise OSError(5, "Input/output error")
        sync(path)

    monkeypatch.setattr(Path, "rename", refusing)
    monkeypatch.setattr(files, "sync", unsynced)
    with pytest.raises(OSError, match="Input/output"):
        small(4, 2.0)
    assert files.read(folder).state.weights["w"][0] == 1.0
    assert [path.name for path in folder.parent.iterdir()] == ["step-4"]


def test_a_manifest_cannot_name_files_elsewhere_and_one_of_0_1_0_loads(small):
    folder = small(1)
    raw = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    del raw["compute"]
    (folder / "manifest.json").write_bytes(msgspec.json.encode(raw))
    assert checkpoints.read_manifest(folder).compute is None
    assert files.read(folder).loop == loop_of(1)
    raw["files"]["../outside"] = {"size_bytes": 1, "sha256": ""}
    (folder / "manifest.json").write_bytes(msgspec.json.encode(raw))
    with pytest.raises(InvalidInputError, match="is not a name"):
        checkpoints.verify(folder)


@pytest.mark.parametrize("backend", ["torch", "mlx"])
def test_an_adapter_s_checkpoint_opens_in_peft_and_says_how_it_was_computed(new_rig, tmp_path, backend):
    import torch
    from peft import PeftModel

    rig = new_rig(backend, adapter={"kind": "rslora", "rank": 4, "alpha": 16.0})
    for step in range(1, 4):
        rig.train(step, 5)
    model, folder = Path(rig.config.model.path), tmp_path / "checkpoints" / "step-3"
    about = files.About(rig.backend.compute, adapter=rig.backend.recipe.adapter.peft_config(model))
    files.write(folder, "r", loop_of(3), rig.backend.export_state(), model, about)
    assert checkpoints.read_manifest(folder).compute == rig.backend.compute
    batch = rig.dataset.batch(np.arange(3))
    opened: Any = PeftModel.from_pretrained(library_model(new_rig("torch")), str(folder)).eval()
    with torch.inference_mode():
        logits = torch.log_softmax(opened(input_ids=torch.tensor(batch.inputs, dtype=torch.int64)).logits, -1)
    theirs = logits.gather(-1, torch.tensor(batch.targets, dtype=torch.int64)[..., None])[..., 0].numpy()
    assert np.abs(theirs - rig.backend.token_log_probabilities(batch))[batch.counted > 0].max() < 1e-5
