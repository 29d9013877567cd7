"""Which checkpoints stay."""

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.trainer.support.trained_run import TrainedRun

from trainctl.protocol.record import checkpoints
from trainctl.trainer.checkpoints.files import prune, spare


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
