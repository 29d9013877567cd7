"""Tensor files: safetensors, written in pieces that another thread can run between, each piece hashed as it passes.

The format: the header's length as u64 (little endian), the header as JSON (of each tensor its dtype, shape, and the
range of its bytes), padded with spaces to a multiple of 8; then all tensors, one after another. With zstd each piece is
a frame of its own, so that the `zstd` program decompresses the whole to a safetensors file.
"""

import hashlib
import importlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

from trainctl.protocol.errors import InvalidInputError, installing
from trainctl.protocol.files.durable_files import flush, read_from_disk
from trainctl.protocol.record.checkpoints import FileEntry

PIECE_BYTES: Final = 16 << 20
"""Most bytes that are compressed, hashed or written at once."""
SYNC_BYTES: Final = 64 << 20
"""Bytes after which a file is sent to its disk: what the meter has counted is there, and the system never holds more
than this of it back."""
ZSTD_SUFFIX: Final = ".zst"
ZSTD_LEVEL: Final = 1
"""Level of compression: of the noise in trained numbers, higher ones gain nothing."""
_DTYPES: Final = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_NUMPY: Final = {name: np.dtype(dtype) for dtype, name in _DTYPES.items()}

Arrays = Mapping[str, NDArray[Any]]
Meter = Callable[[int], None]
"""Receives the number of bytes that have reached the disk, or were read back, since its last call."""


def write_tensors(path: Path, arrays: Arrays, meter: Meter, *, zstd: bool = False) -> FileEntry:
    """Write a file and flush it to its disk; its size and SHA-256. The meter counts bytes before compression. Raises
    OSError, and InvalidInputError without the library for zstd."""
    pack: Callable[[Any], Any] = _same
    if zstd:
        pack = zstandard("run file: checkpoint.compression").ZstdCompressor(ZSTD_LEVEL).compress
    digest, size, unsynced = hashlib.sha256(), 0, 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(arrays):
            packed = pack(piece)
            _write_all(file, packed)
            digest.update(packed)
            size += len(packed)
            unsynced += len(piece)
            if unsynced >= SYNC_BYTES:
                os.fsync(file.fileno())  # the disk's own cache is flushed once, at the end
                meter(unsynced)
                unsynced = 0
        flush(file.fileno())
        meter(unsynced)
    return FileEntry(size, digest.hexdigest())


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a compressed file. Raises InvalidInputError without the library, ValueError for another format."""
    with path.open("rb") as file, zstandard(str(path)).ZstdDecompressor().stream_reader(
        file, read_across_frames=True
    ) as stream:  # fmt: skip
        length = int.from_bytes(_exactly(stream, 8), "little")
        header = json.loads(_exactly(stream, length))
        header.pop("__metadata__", None)
        found = sorted(header.items(), key=lambda item: item[1]["data_offsets"][0])
        return {name: _read_one(stream, about) for name, about in found}


def zstandard(where: str) -> Any:
    """The library. Raises InvalidInputError naming how to install it."""
    try:
        return importlib.import_module("zstandard")
    except ImportError:
        raise InvalidInputError(where, f"zstd needs a package: {installing('zstd')}") from None


def read_back(path: Path, entry: FileEntry, meter: Meter) -> None:
    """Read a file from its disk, as far as the system allows, and compare. Raises OSError if it differs."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        read_from_disk(file.fileno())
        while piece := file.read(PIECE_BYTES):
            digest.update(piece)
            meter(len(piece))
    if digest.hexdigest() != entry.sha256:
        raise OSError(f"{path.name} was read back differently than it was written; check the disk")


def _pieces(arrays: Arrays) -> Iterator[memoryview]:
    yield memoryview(_header(arrays))
    for name in _in_order(arrays):
        whole = _bytes_of(np.ascontiguousarray(arrays[name]))
        for begin in range(0, len(whole), PIECE_BYTES):
            yield whole[begin : begin + PIECE_BYTES]


def _in_order(arrays: Arrays) -> list[str]:
    """Widest elements first, so that each tensor is aligned."""
    return sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))


def _header(arrays: Arrays) -> bytes:
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in _in_order(arrays):
        array = arrays[name]
        end = at + array.nbytes
        about[name] = {"dtype": _DTYPES[array.dtype.name], "shape": [*array.shape], "data_offsets": [at, end]}
        at = end
    text = json.dumps(about, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_all(file: IO[bytes], data: Any) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _read_one(stream: Any, about: dict[str, Any]) -> NDArray[Any]:
    array = np.empty(about["shape"], _NUMPY[about["dtype"]])
    left = _bytes_of(array)
    while left:
        count = stream.readinto(left[:PIECE_BYTES])
        if not count:
            raise ValueError("ends in the middle of a tensor")
        left = left[count:]
    return array


def _exactly(stream: Any, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = stream.read(size - len(parts))
        if not part:
            raise ValueError("ends in the middle of its header")
        parts += part
    return bytes(parts)


def _bytes_of(array: NDArray[Any]) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _same(piece: Any) -> Any:
    return piece
