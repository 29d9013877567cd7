"""Pages that are dropped from memory come from the disk again."""

import mmap
import os
import subprocess

import pytest

from trainctl.trainer.data.token_cache import _is_cached, drop_pages


def is_cached(path):
    file = os.open(path, os.O_RDONLY)
    try:
        return _is_cached(file)
    finally:
        os.close(file)


def filesystem(path):
    return subprocess.run(
        ["stat", "-f", "-c", "%T", str(path)], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.needs("linux")  # only Linux reports which parts of a file are cached
def test_dropped_pages_are_gone_and_mapped_ones_are_not(tmp_path):
    if filesystem(tmp_path) == "tmpfs":
        assert not drop_pages([_written(tmp_path / "a")])
        return
    first, second = _written(tmp_path / "a"), _written(tmp_path / "b")
    assert is_cached(first)
    assert drop_pages([first, second])
    first.read_bytes()
    assert is_cached(first)
    with first.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) >= 0
        assert not drop_pages([first])
    assert drop_pages([])


def _written(path):
    path.write_bytes(os.urandom(1 << 20))
    return path
