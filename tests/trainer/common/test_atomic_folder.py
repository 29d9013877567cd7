"""Folders that appear under their name only when whole, also after a power cut."""

import errno
from pathlib import Path

import pytest
from tests.trainer.support.synced_disk import ALSO, SyncedDisk, Tree

from trainctl.trainer.common import atomic_folder
from trainctl.trainer.common.atomic_folder import make_folder

WHOLE: Tree = {"made": {"a": b"1", "inner": {"b": b"2"}}}


def fill(work: Path) -> None:
    (work / "a").write_bytes(b"1")
    (work / "inner").mkdir()
    (work / "inner" / "b").write_bytes(b"2")


def test_a_power_cut_leaves_a_whole_folder_or_none(tmp_path: Path) -> None:
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        make_folder(tmp_path / "made", fill)
    for moment in disk.moments:
        for also in ALSO:
            assert moment.after_a_cut(also).get("made") in (None, WHOLE["made"]), (moment.call, moment.path, also)
    assert [disk.moments[-1].after_a_cut(also) for also in ALSO] == [WHOLE] * len(ALSO)


def test_a_link_may_lead_nowhere(tmp_path: Path) -> None:
    make_folder(tmp_path / "made", lambda work: (work / "link").symlink_to("nowhere"))
    assert (tmp_path / "made" / "link").is_symlink()


def test_new_folders_are_kept_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(atomic_folder, "sync", synced.append)
    for _ in range(2):  # the second time there is nothing to do
        atomic_folder.make_durable(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO])
def test_a_file_system_that_syncs_no_folders_is_used_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    file = tmp_path / "file"
    file.touch()

    def refused(descriptor: int) -> None:
        raise OSError(number, "refused")

    monkeypatch.setattr(atomic_folder, "flush", refused)
    with pytest.raises(OSError, match="refused"):
        atomic_folder.sync(file)
    if number == errno.EINVAL:
        atomic_folder.sync(tmp_path)
        return
    with pytest.raises(OSError, match="refused"):
        atomic_folder.sync(tmp_path)
