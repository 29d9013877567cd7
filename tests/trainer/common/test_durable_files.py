"""Flushes and reads of a disk, by the calls that each system gets."""

import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainctl.trainer.common import durable_files

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
        raise OSError(45, "Operation not supported")

    on_macos(monkeypatch)
    monkeypatch.setattr(fcntl, "fcntl", recorded(calls, "fcntl", refuse))
    durable_files.flush(descriptor)
    durable_files.read_from_disk(descriptor)
    assert calls == [("fcntl", descriptor, FULL), ("fsync", descriptor), ("fcntl", descriptor, UNCACHED, 1)]


def test_a_disk_s_error_is_raised(tmp_path: Path) -> None:
    closed = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.close(closed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        durable_files.flush(closed)
