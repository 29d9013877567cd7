"""The power goes at any moment while a checkpoint is written and older ones are removed: what is left loads."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.trainer.support.synced_disk import ALSO, SyncedDisk, Tree, lay
from tests.trainer.support.trained_run import TrainedRun
from tests.trainer.support.written_checkpoints import write_small

from trainctl.node_agent.copies import copy_process
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import sync
from trainctl.protocol.record import checkpoints
from trainctl.trainer.checkpoints import files


def loaded(folder):
    """Return the steps of the complete checkpoints in a folder, each with its first weight."""
    found = {}
    for path in checkpoints.listed(folder):
        try:
            read = files.read(path)
        except InvalidInputError:
            continue
        found[read.loop.step] = float(next(iter(read.state.weights.values())).flat[0])
    return found


def cut_anywhere(disk, place):
    """`loaded` of each state that a power cut may leave; the last ones are those after the last call."""
    place.mkdir()
    trees = list[Tree]()
    for moment in disk.moments:
        for also in ALSO:
            tree = moment.after_a_cut(also)
            if tree not in trees or moment is disk.moments[-1]:
                trees.append(tree)
    found = []
    for number, tree in enumerate(trees):
        lay(tree, place / str(number))
        found.append(loaded(place / str(number)))
    return found


@pytest.fixture(scope="module")
def written(tmp_path_factory, chat_model):
    """A run keeps two checkpoints: step 4's is written beside those of 2 and 3."""
    folder = tmp_path_factory.mktemp("written")
    run = TrainedRun(
        folder / "run-1", chat_model, "torch", {"kind": "lora", "rank": 2},
        saved=(1, 2, 3), checkpoint={"keep_last": 2},
    )  # fmt: skip
    assert [path.name for path in checkpoints.listed(run.paths.checkpoints)] == ["step-3", "step-2"]
    disk = SyncedDisk(run.paths.checkpoints)
    with disk.recorded():
        run._saver.write()
    assert [path.name for path in checkpoints.listed(run.paths.checkpoints)] == ["step-4", "step-3"]
    return disk


def test_all_of_a_checkpoint_is_synced_before_its_name_and_its_name_before_older_ones_go(written):
    calls = [(moment.call, moment.path) for moment in written.moments]
    published = next(at for at, moment in enumerate(written.moments) if moment.target == "step-4")
    part = calls[published][1]
    node = written.moments[published].names[written.moments[published].root]["step-4"]
    names = written.moments[published].names[node]
    assert {"manifest.json", "state.json", "optimizer.safetensors", "adapter_model.safetensors"} < {*names}
    synced = [path for call, path in calls[:published] if call == "sync"]
    assert {*synced} >= {f"{part}/{name}" for name in names}
    assert synced[-2:] == [f"{part}/manifest.json", part]
    named = calls.index(("sync", "."), published)
    gone = [at for at, (call, path) in enumerate(calls) if call in ("rename", "remove") and "step-2" in path]
    assert len(gone) > len(names)
    assert published < named < min(gone)


def test_two_checkpoints_are_left_and_once_it_is_written_the_new_one(written, tmp_path):
    left = cut_anywhere(written, tmp_path / "cuts")
    assert all({2, 3} <= {*steps} or {3, 4} <= {*steps} for steps in left), left
    assert 4 not in left[0]
    assert [max(steps) for steps in left[-len(ALSO) :]] == [4] * len(ALSO)


Write = Callable[[int, float], Path]


@pytest.fixture
def write(tmp_path, assets):
    """Write a checkpoint of one weight."""
    return lambda step, value: write_small(tmp_path / "run-1" / "checkpoints", assets / "model", step, value, 1)


def test_a_step_that_is_done_again_has_one_checkpoint_or_the_other(write, tmp_path):
    write(3, 3.0)
    disk = SyncedDisk(write(4, 4.0).parent)
    with disk.recorded():
        write(4, 5.0)
    left = cut_anywhere(disk, tmp_path / "cuts")
    assert all(steps in ({3: 3.0, 4: 4.0}, {3: 3.0, 4: 5.0}) for steps in left), left
    assert left[0][4] == 4.0
    assert [steps[4] for steps in left[-len(ALSO) :]] == [5.0] * len(ALSO)


def test_one_that_is_there_already_is_on_the_disk_before_older_ones_go(write, tmp_path):
    """Its writer was killed between the rename and the sync."""
    for step in (2, 3, 4):
        folder = write(step, float(step))
    disk = SyncedDisk(folder.parent)
    disk.holds({"step-2": "step-2", "step-3": "step-3"})
    with disk.recorded():
        write(4, 4.0)
        files.prune(folder.parent, 2, [folder])
    left = cut_anywhere(disk, tmp_path / "cuts")
    assert [path.name for path in checkpoints.listed(folder.parent)] == ["step-4", "step-3"]
    assert all({2, 3} <= {*steps} or {3, 4} <= {*steps} for steps in left), left


def test_one_that_was_set_aside_goes_once_its_successor_is_on_the_disk(write, tmp_path, dead_pid):
    """Its writer was killed between the renames and the sync."""
    folder = write(4, 4.0)
    before = folder.rename(tmp_path / "before")
    write(4, 5.0)
    aside = before.rename(folder.with_name(f".step-4.{dead_pid}.old"))
    disk = SyncedDisk(folder.parent)
    disk.holds({"step-4": aside.name})
    with disk.recorded():
        files.tidy(folder.parent)
    assert [path.name for path in folder.parent.iterdir()] == ["step-4"]
    left = cut_anywhere(disk, tmp_path / "cuts")
    assert all(steps in ({4: 4.0}, {4: 5.0}) for steps in left), left


class EndedError(Exception):
    """In place of a kill."""


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.tier("all"))])
def test_a_copy_that_is_done_is_on_its_disk(write, tmp_path, monkeypatch, again):
    """At once; or after a try that ended before one of its syncs."""
    folder, count = write(4, 4.0), [0]

    def counted(path):
        count[0] -= 1
        if count[0] == 0:
            raise EndedError
        sync(path)

    monkeypatch.setattr(copy_process, "sync", counted)
    syncs = len(checkpoints.read_manifest(folder).files) + 3  # of the manifest, of the folder, and of its name
    for number in range(1, syncs + 1) if again else [0]:
        target = tmp_path / f"there-{number}"
        place = target / "run-1" / "checkpoints"
        place.mkdir(parents=True)
        disk = SyncedDisk(place)
        with disk.recorded():
            if again:
                count[0] = number
                with pytest.raises(EndedError):
                    copy_process.to_path(target, folder)
            copy_process.to_path(target, folder)
        left = cut_anywhere(disk, tmp_path / f"cuts-{number}")
        assert left[0] == {}
        assert left[-len(ALSO) :] == [{4: 4.0}] * len(ALSO), number
