"""Flushes and reads of a disk, by the calls that each system gets."""

import contextlib
import errno
import fcntl
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.trainer.support.synced_disk import Also, SyncedDisk

from trainctl.protocol.files import durable_files
from trainctl.trainer.common.atomic_folder import make_folder

FULL, UNCACHED = 51, 48
"""F_FULLFSYNC and F_NOCACHE of macOS."""
Calls = list[tuple[Any, ...]]


@pytest.mark.parametrize(
    ("system", "error", "flushed", "read"),
    [
        ("macos", 0, [("fcntl", FULL)], [("fcntl", UNCACHED, 1)]),
        ("macos", errno.ENOTSUP, [("fcntl", FULL), ("fsync",)], [("fcntl", UNCACHED, 1)]),
        ("macos", errno.EIO, [("fcntl", FULL)], []),
        ("linux", 0, [("fsync",)], [("posix_fadvise", 0, 0, 4)]),
    ],
)
def test_a_flush_empties_the_disk_s_cache_where_the_system_has_a_call_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, error: int, flushed: Calls, read: Calls
) -> None:
    """A file system that refuses gets an fsync and is read from its cache; a disk that fails is no such file system."""
    calls: Calls = []

    def recorded(name: str, error: int = 0) -> Callable[..., int]:
        def call(descriptor: int, *arguments: int) -> int:
            calls.append((name, *arguments))
            if error:
                raise OSError(error, os.strerror(error))
            return 0

        return call

    monkeypatch.setattr(os, "fsync", recorded("fsync"))
    monkeypatch.setattr(fcntl, "fcntl", recorded("fcntl", error))
    for name, number in (("F_FULLFSYNC", FULL), ("F_NOCACHE", UNCACHED)):
        monkeypatch.setattr(fcntl, name, number, raising=False)
        if system == "linux":
            monkeypatch.delattr(fcntl, name)
    monkeypatch.setattr(os, "posix_fadvise", recorded("posix_fadvise"), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    if system == "macos":
        monkeypatch.delattr(os, "posix_fadvise")
    with (tmp_path / "file").open("wb") as file:
        with contextlib.nullcontext() if error != errno.EIO else pytest.raises(OSError, match=os.strerror(error)):
            durable_files.flush(file.fileno())
        assert calls == flushed
        if read:
            durable_files.read_from_disk(file.fileno())
        assert calls == flushed + read


def test_new_folders_are_kept_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable_files, "sync", synced.append)
    for _ in range(2):  # the second time there is nothing to do
        durable_files.make_folder(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()
    assert synced == [tmp_path, tmp_path / "a", tmp_path / "a" / "b"]


def test_a_file_system_that_syncs_no_folders_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for number in (errno.EINVAL, errno.EIO):
        monkeypatch.setattr(durable_files, "flush", Mock(side_effect=OSError(number, "refused")))
        with pytest.raises(OSError, match="refused"):
            durable_files.sync(tmp_path / "file")
        with contextlib.nullcontext() if number == errno.EINVAL else pytest.raises(OSError, match="refused"):
            durable_files.sync(tmp_path)


@pytest.mark.parametrize("before", [None, b"old"])
def test_a_power_cut_leaves_the_old_file_or_the_new_one(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "run" / "run.toml"
    durable_files.make_folder(path.parent)
    if before is not None:
        durable_files.write_file(path, before)
    disk = SyncedDisk(tmp_path)
    with disk.recorded():
        durable_files.write_file(path, b"new")
    also: tuple[Also, ...] = ("nothing", "names")  # a file that is replaced isn't removed before
    left = [moment.after_a_cut(each).get("run", {}) for moment in disk.moments for each in also]
    assert all(tree.get("run.toml") in (before, b"new") for tree in left), left
    assert [moment["run.toml"] for moment in left[-len(also) :]] == [b"new"] * len(also)
    assert [*path.parent.iterdir()] == [path]


def test_a_file_is_as_it_was_if_the_writer_fails(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable_files.write_file(path, b"old", 0o600)
    with pytest.raises(ValueError, match="half-way"), durable_files.replaced(path) as file:
        file.write(b"new")
        raise ValueError("half-way")
    assert path.read_bytes() == b"old"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [*tmp_path.iterdir()] == [path]


def test_a_file_that_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    path = tmp_path / "run[1].toml"
    names = (".run[1].toml.0123abcd.part", ".run[1].toml.4567abcd.part", ".run1.toml.0123abcd.part")
    left, at_work, other = (tmp_path / name for name in names)
    for part in (left, at_work, other):
        part.touch()
    for part in (left, other):
        os.utime(part, (0, 0))
    durable_files.write_file(path, b"new")
    assert sorted(tmp_path.iterdir()) == sorted([at_work, other, path])


@contextlib.contextmanager
def only_bytes(count: int) -> Iterator[None]:
    """No file of this process may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_error_of_writing_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    with pytest.raises(OSError, match=str(path)), only_bytes(1000):
        durable_files.write_file(path, bytes(2000))
    assert [path.read_bytes(), *tmp_path.iterdir()] == [b"old", path]

    def write(work: Path) -> None:
        (work / "weights").write_bytes(bytes(2000))

    with pytest.raises(OSError, match=str(tmp_path / "step-3")), only_bytes(1000):
        make_folder(tmp_path / "step-3", write)
