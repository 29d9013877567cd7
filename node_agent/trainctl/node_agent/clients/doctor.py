"""Facts for `trainctl doctor` about this node: its machine's, digests of a run's files, and the speed of its disk."""

import asyncio
from pathlib import Path

from trainctl.protocol import messages as m
from trainctl.protocol.config.hub_models import is_hub_id, model_folder
from trainctl.protocol.config.run_file import data_files, lacks_files
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import disk_speed, facts
from trainctl.protocol.machine.devices import read_devices
from trainctl.protocol.machine.file_digests import FileDigests, data_digests, model_digests

_Stamp = tuple[tuple[str, int, int], ...]
"""Path, size and modification time of each file."""
MAX_KEPT = 16


class Doctor:
    """Digests are made once for files that don't change, however often and by how many they are asked for."""

    def __init__(self, node: str, keys_folder: Path, state_folder: Path) -> None:
        self._node, self._keys_folder, self._state_folder = node, keys_folder, state_folder
        self._made: dict[_Stamp, asyncio.Task[FileDigests]] = {}
        self._one_at_a_time = asyncio.Lock()  # two readers make one disk slower than either

    async def facts(self, request: m.FactsRequest) -> m.Facts:
        devices = await asyncio.to_thread(read_devices)
        folders = self._keys_folder, self._state_folder
        return await asyncio.to_thread(facts.gather, self._node, *folders, rid=request.rid, devices=devices)

    async def digests(self, request: m.DigestsRequest) -> m.Digests:
        """Raises InvalidInputError for a path that could be anywhere."""
        path = Path(request.path)
        if request.what == "model" and is_hub_id(request.path):
            path = await asyncio.to_thread(model_folder, request.path)
            if not path.is_absolute():
                return m.Digests(rid=request.rid, digest="", problem="not in the Hugging Face cache")
        _check_absolute(path)
        try:
            files = await asyncio.to_thread(_files, request, path)
            found = await asyncio.shield(self._digests(request, path, _stamp(files)))
        except OSError as error:
            problem = f"{error.filename or path}: {error.strerror or error}"
            return m.Digests(rid=request.rid, digest="", problem=problem)
        return m.Digests(rid=request.rid, digest=found.whole, files=found.files)

    async def disk(self, request: m.DiskRequest) -> m.Disk:
        """Raises InvalidInputError for a path that could be anywhere."""
        folder = Path(request.folder) if request.folder else self._state_folder.absolute()
        _check_absolute(folder)
        async with self._one_at_a_time:
            return await asyncio.to_thread(_disk, request.rid, folder)

    def _digests(self, request: m.DigestsRequest, path: Path, stamp: _Stamp) -> "asyncio.Task[FileDigests]":
        if stamp not in self._made:
            while len(self._made) >= MAX_KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[stamp] = asyncio.create_task(self._make(request, path, stamp))
        return self._made[stamp]

    async def _make(self, request: m.DigestsRequest, path: Path, stamp: _Stamp) -> FileDigests:
        try:
            async with self._one_at_a_time:
                if request.what == "model":
                    return await asyncio.to_thread(model_digests, path)
                return await asyncio.to_thread(data_digests, path, request.kind)
        except OSError:
            self._made.pop(stamp, None)
            raise


def _check_absolute(path: Path) -> None:
    if not path.is_absolute() or ".." in path.parts:
        raise InvalidInputError("path", f"{str(path)!r} must be an absolute path without '..'")


def _disk(rid: str, folder: Path) -> m.Disk:
    """Of a folder, or of the one above it: a run makes its folder of token caches."""
    there = folder if folder.is_dir() else folder.parent
    try:
        speed = disk_speed.measure(there)
    except OSError as error:
        return m.Disk(rid=rid, folder=str(there), problem=f"{there}: {error.strerror or error}")
    return m.Disk(rid=rid, folder=str(there), write_bytes_per_second=speed.write, read_bytes_per_second=speed.read)


def _files(request: m.DigestsRequest, path: Path) -> list[Path]:
    """Only what a model or data can be made of is ever read. Raises OSError naming what isn't there."""
    if request.what == "model":
        return [path / "config.json", *sorted(path.glob("*.safetensors"))]
    found = data_files(path, request.kind)
    if not found:
        raise FileNotFoundError(2, lacks_files(path, request.kind), str(path))
    return found


def _stamp(files: list[Path]) -> _Stamp:
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat()))
