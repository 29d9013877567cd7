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
from typing import Any, Final

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
BFLOAT16: Final = np.dtype([("bfloat16", "<u2")])
"""numpy has no such numbers: these are their bits."""
DTYPES: Final[Mapping[str, np.dtype[Any]]] = {
    f"{letter}{8 * size}": np.dtype(f"{kind}{size}")
    for letter, kind, sizes in (("F", "f", (2, 4, 8)), ("I", "i", (1, 2, 4, 8)), ("U", "u", (1, 2, 4, 8)))
    for size in sizes
} | {"BF16": BFLOAT16, "BOOL": np.dtype(np.bool_)}
"""Types by their names in files."""
_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}

Arrays = Mapping[str, NDArray[Any]]
Meter = Callable[[int], None]
"""Receives the number of bytes that have reached the disk, or were read back, since its last call."""


def write_tensors(path: Path, arrays: Arrays, meter: Meter, *, zstd: bool = False) -> FileEntry:
    """Write a file and flush it to its disk; return its size and SHA-256. The meter counts bytes before compression.
    Raises OSError, and InvalidInputError without the library for zstd."""
    compressor = zstandard("run file: checkpoint.compression").ZstdCompressor(ZSTD_LEVEL) if zstd else None
    digest, size, unsynced = hashlib.sha256(), 0, 0
    with path.open("wb", buffering=0) as file:
        for piece in _pieces(arrays):
            packed = memoryview(compressor.compress(piece) if compressor is not None else piece)
            digest.update(packed)
            size += len(packed)
            while packed:
                packed = packed[file.write(packed) :]
            unsynced += len(piece)
            if unsynced >= SYNC_BYTES:
                os.fsync(file.fileno())  # the disk's own cache is flushed once, at the end
                meter(unsynced)
                unsynced = 0
        flush(file.fileno())
        meter(unsynced)
    return FileEntry(size, digest.hexdigest())


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Return the arrays of a compressed file. Raises InvalidInputError without the library, and ValueError for another
    format."""
    decompressor = zstandard(str(path)).ZstdDecompressor()
    with path.open("rb") as file, decompressor.stream_reader(file, read_across_frames=True) as stream:
        length = int.from_bytes(_read(stream, bytearray(8), "its header"), "little")
        header = json.loads(_read(stream, bytearray(length), "its header"))
        header.pop("__metadata__", None)
        arrays = {}
        for name, about in sorted(header.items(), key=lambda item: item[1]["data_offsets"][0]):
            arrays[name] = np.empty(about["shape"], DTYPES[about["dtype"]])
            _read(stream, _bytes_of(arrays[name]), "a tensor")
        return arrays


def zstandard(where: str) -> Any:
    """Return the library. Raises InvalidInputError naming how to install it."""
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
    # Widest elements first, so that each tensor is aligned.
    order = sorted(arrays, key=lambda name: (-arrays[name].itemsize, name))
    about: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in order:
        array = arrays[name]
        end = at + array.nbytes
        about[name] = {"dtype": _NAMES[array.dtype], "shape": [*array.shape], "data_offsets": [at, end]}
        at = end
    header = json.dumps(about, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for name in order:
        whole = _bytes_of(np.ascontiguousarray(arrays[name]))
        for begin in range(0, len(whole), PIECE_BYTES):
            yield whole[begin : begin + PIECE_BYTES]


def _bytes_of(array: NDArray[Any]) -> memoryview:
    flat: Any = array.reshape(-1).view(np.uint8)
    return memoryview(flat)


def _read(stream: Any, buffer: Any, what: str) -> Any:
    """Fill a buffer and return it."""
    left = memoryview(buffer)
    while left:
        count = stream.readinto(left[:PIECE_BYTES])
        if not count:
            raise ValueError(f"ends in the middle of {what}")
        left = left[count:]
    return buffer
