"""Tensor files: ours are safetensors, compressed or not; a disk that changes a byte is noticed."""

import os

import numpy as np
import pytest
import zstandard
from safetensors.numpy import load, load_file

from trainctl.protocol.record.checkpoints import digest_of
from trainctl.trainer.checkpoints import chunked_tensors
from trainctl.trainer.checkpoints.chunked_tensors import read_back, read_tensors, write_tensors


def arrays():
    of = np.random.default_rng(3)
    return {
        "b.weight": of.standard_normal((7, 5)).astype(np.float32), "a": np.arange(3, dtype=np.uint8),
        "scalar": np.float32(2.5).reshape(()), "empty": np.zeros((0, 4), np.float32),
        "turned": of.standard_normal((4, 6)).astype(np.float32).T, "wide": np.arange(4, dtype=np.int64),
    }  # fmt: skip


def same(one, other):
    shaped = {name: (array.shape, array.tobytes()) for name, array in one.items()}
    return shaped == {name: (array.shape, array.tobytes()) for name, array in other.items()}


@pytest.mark.parametrize("piece", [chunked_tensors.PIECE_BYTES, 24])
def test_safetensors_opens_what_is_written(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(chunked_tensors, "PIECE_BYTES", piece)
    path, passed = tmp_path / "x.safetensors", list[int]()
    entry = write_tensors(path, arrays(), passed.append)
    assert same(load_file(path), arrays())
    assert (entry.size_bytes, entry.sha256) == (path.stat().st_size, digest_of(path))
    assert sum(passed) == entry.size_bytes


@pytest.mark.parametrize(("sync", "calls"), [(chunked_tensors.SYNC_BYTES, 1), (64, 4)])
def test_bytes_count_once_they_are_flushed_to_the_disk(tmp_path, monkeypatch, sync, calls):
    flushed, counted, fsync = [0], list[int](), os.fsync

    def flush(descriptor):
        fsync(descriptor)
        flushed.append(os.fstat(descriptor).st_size)

    def meter(count):
        counted.append(count)
        assert sum(counted) == flushed[-1]

    monkeypatch.setattr(os, "fsync", flush)
    monkeypatch.setattr(chunked_tensors, "SYNC_BYTES", sync)
    write_tensors(tmp_path / "x.safetensors", arrays(), meter)
    assert len(counted) >= calls
    assert flushed[-1] == (tmp_path / "x.safetensors").stat().st_size


@pytest.mark.parametrize("piece", [chunked_tensors.PIECE_BYTES, 24])
def test_a_compressed_one_is_read_in_pieces_and_is_a_zst_file(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(chunked_tensors, "PIECE_BYTES", piece)
    path = tmp_path / "x.safetensors.zst"
    assert write_tensors(path, arrays(), lambda _: None, zstd=True).sha256 == digest_of(path)
    assert same(read_tensors(path), arrays())
    assert same(
        load(zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()), arrays()
    )


def test_a_cut_one_is_refused(tmp_path):
    path = tmp_path / "x.zst"
    write_tensors(path, arrays(), lambda _: None, zstd=True)
    whole = zstandard.ZstdDecompressor().stream_reader(path.read_bytes(), read_across_frames=True).read()
    path.write_bytes(zstandard.ZstdCompressor().compress(whole[:-9]))
    with pytest.raises(ValueError, match="ends in the middle of a tensor"):
        read_tensors(path)


def test_a_byte_that_the_disk_has_changed_is_noticed(tmp_path):
    path = tmp_path / "x.safetensors"
    entry = write_tensors(path, arrays(), lambda _: None)
    read_back(path, entry, lambda _: None)
    with path.open("r+b") as file:
        file.seek(-3, os.SEEK_END)
        file.write(b"\x7f")
    with pytest.raises(OSError, match=r"x\.safetensors was read back differently"):
        read_back(path, entry, lambda _: None)
