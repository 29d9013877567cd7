"""Flushes and reads of a disk, by the calls that each system gets."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.support.synced_disk import Also, SyncedDisk

from trainctl.protocol.files import durable_files

FULL, UNCACHED = 51, 48
"""F_FULLFSYNC and F_NOCACHE of macOS."""
Calls = list[tuple[Any, ...]]


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    made = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    yield made
    os.close(made)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls on descriptors, in their order; the system carries out those that it has."""
    made: Calls = []
    monkeypatch.setattr(os, "fsync", recorded(made, "fsync", os.fsync))
    monkeypatch.setattr(fcntl, "fcntl", recorded(made, "fcntl"))
    return made


def recorded(calls: Calls, name: str, real: Callable[..., Any] = lambda *_: 0) -> Callable[..., Any]:
    def call(*arguments: Any) -> Any:
        calls.append((name, *arguments))
        return real(*arguments)

    return call


def on_macos(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "F_FULLFSYNC", FULL, raising=False)
    monkeypatch.setattr(fcntl, "F_NOCACHE", UNCACHED, raising=False)
    monkeypatch.delattr(os, "posix_fadvise", raising=False)


def on_linux(monkeypatch: pytest.MonkeyPatch, calls: Calls) -> None:
    for name in ("F_FULLFSYNC", "F_NOCACHE"):
        monkeypatch.delattr(fcntl, name, raising=False)
    monkeypatch.setattr(os, "posix_fadvise", recorded(calls, "posix_fadvise"), raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)


def test_where_fsync_leaves_bytes_in_the_disk_s_cache_that_is_emptied_too(
    descriptor: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_macos(monkeypatch)
    durable_files.flush(descriptor)
    durable_files.read_from_disk(descriptor)
    assert calls == [("fcntl", descriptor, FULL), ("fcntl", descriptor, UNCACHED, 1)]


def test_elsewhere_a_flush_is_one_fsync(descriptor: int, calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    on_linux(monkeypatch, calls)
    durable_files.flush(descriptor)
    durable_files.read_from_disk(descriptor)
    assert calls == [("fsync", descriptor), ("posix_fadvise", descriptor, 0, 0, 4)]


def test_a_file_system_that_refuses_gets_an_fsync_and_is_read_from_its_cache(
    descriptor: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    on_macos(monkeypatch)
    monkeypatch.setattr(fcntl, "fcntl", recorded(calls, "fcntl", refuse))
    durable_files.flush(descriptor)
    durable_files.read_from_disk(descriptor)
    assert calls == [("fcntl", descriptor, FULL), ("fsync", descriptor), ("fcntl", descriptor, UNCACHED, 1)]


def test_a_disk_that_fails_to_empty_its_cache_is_no_file_system_that_refuses(
    descriptor: int, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    on_macos(monkeypatch)
    monkeypatch.setattr(fcntl, "fcntl", recorded(calls, "fcntl", fail))
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        durable_files.flush(descriptor)
    assert calls == [("fcntl", descriptor, FULL)]


def test_new_folders_are_kept_with_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(durable_files, "sync", synced.append)
    for _ in range(2):  # the second time there is nothing to do
        durable_files.make_folder(tmp_path / "a" / "b" / "c")
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

    monkeypatch.setattr(durable_files, "flush", refused)
    with pytest.raises(OSError, match="refused"):
        durable_files.sync(file)
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
