"""Facts for `trainctl doctor` about this node: its machine's, digests of a run's files, and the speed of its disk.

Of files it reads, and measures, only what a run file of a run on this node names.
"""

import asyncio
import contextlib
import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from trainctl.protocol.config import run_file
from trainctl.protocol.config.data_files import data_files, lacks_files
from trainctl.protocol.config.model_facts import is_hub_id, model_folder, weight_files
from trainctl.protocol.config.run_tables import NodeTable
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.machine import facts, speeds
from trainctl.protocol.machine.devices import read_devices
from trainctl.protocol.machine.file_digests import FileDigests, data_digests, model_digests
from trainctl.protocol.messages import Digests, DigestsRequest, Disk, DiskRequest, Facts, FactsRequest

_Stamp = tuple[tuple[str, int, int], ...]
"""Path, size and modification time of each file."""
_Named = tuple[str, str, str]
"""A path that a run file names: `model`, `data` or `cache`, the path, and the kind of data."""
T = TypeVar("T")
MAX_KEPT = 16
MAX_RUN_FILES = 1000
"""Run files whose paths are kept."""


class Doctor:
    """Digests are made once for files that don't change, however often and by how many they are asked for."""

    def __init__(
        self, node: str, keys_folder: Path, state_folder: Path, run_files: Callable[[], Iterable[Path]] = lambda: ()
    ) -> None:
        """`run_files` returns the run files of this node's runs, newest first."""
        self._node, self._keys_folder, self._state_folder = node, keys_folder, state_folder
        self._run_files = run_files
        self.lost_sockets: tuple[str, ...] = ()
        self._named: dict[tuple[str, int, int, int], frozenset[_Named]] = {}  # by run file, as it was when it was read
        self._made: dict[_Stamp, asyncio.Task[FileDigests]] = {}
        self._one_at_a_time = asyncio.Lock()  # two readers make one disk slower than either
        self._is_closed = threading.Event()

    def close(self) -> None:
        """End what is read."""
        self._is_closed.set()

    async def facts(self, request: FactsRequest) -> Facts:
        devices = await _apart(read_devices)
        folders = self._keys_folder, self._state_folder
        gathered = await _apart(lambda: facts.gather(self._node, *folders, rid=request.rid, devices=devices))
        return msgspec.structs.replace(gathered, lost_sockets=self.lost_sockets)

    async def digests(self, request: DigestsRequest) -> Digests:
        """Only of what a run file here names: nothing else is looked at."""
        path, problem = Path(request.path), ""
        kind = request.kind if request.what == "data" else ""
        if not await self._is_named((request.what, str(path), kind)):
            problem = f"no run on {self._node} has this {request.what}: it is read there from the first run on"
            return Digests(rid=request.rid, digest="", problem=problem, named=False)
        if request.what == "model" and is_hub_id(request.path):
            path = await asyncio.to_thread(model_folder, request.path)
            if not path.is_absolute():
                return Digests(rid=request.rid, digest="", problem="not in the Hugging Face cache")
        try:
            stamp = await _apart(lambda: _stamp(_files(request, path)))
            found = await asyncio.shield(self._digests(request, path, stamp))
        except OSError as error:
            problem = f"{error.filename or path}: {error.strerror or error}"
            return Digests(rid=request.rid, digest="", problem=problem)
        except InvalidInputError as error:
            return Digests(rid=request.rid, digest="", problem=str(error))
        return Digests(rid=request.rid, digest=found.whole, files=found.files)

    async def disk(self, request: DiskRequest) -> Disk:
        """Only of the agent's folder, and of those for token caches that a run file here names."""
        folder = Path(request.folder) if request.folder else self._state_folder.absolute()
        if request.folder and not await self._is_named(("cache", str(folder), "")):
            problem = f"no run on {self._node} has this cache_path: it is measured there from the first run on"
            return Disk(rid=request.rid, folder=request.folder, problem=problem, named=False)
        async with self._one_at_a_time:
            return await _apart(lambda: _disk(request.rid, folder))

    async def _is_named(self, wanted: _Named) -> bool:
        files = tuple(self._run_files())  # here: the db is this thread's
        return await _apart(lambda: any(wanted in self._named_by(file) for file in files))

    def _named_by(self, file: Path) -> frozenset[_Named]:
        """The paths that a run file names, read again only where it has changed."""
        try:
            stat = file.stat()
        except OSError:
            return frozenset()
        key = str(file), stat.st_mtime_ns, stat.st_size, stat.st_ino
        if (named := self._named.get(key)) is None:
            named = frozenset(_named(file, self._node))
            if len(self._named) >= MAX_RUN_FILES:
                self._named.clear()
            self._named[key] = named
        return named

    def _digests(self, request: DigestsRequest, path: Path, stamp: _Stamp) -> "asyncio.Task[FileDigests]":
        if stamp not in self._made:
            while len(self._made) >= MAX_KEPT:
                self._made.pop(next(iter(self._made)))
            self._made[stamp] = asyncio.create_task(self._make(request, path, stamp))
        return self._made[stamp]

    async def _make(self, request: DigestsRequest, path: Path, stamp: _Stamp) -> FileDigests:
        try:
            async with self._one_at_a_time:
                if request.what == "model":
                    return await _apart(lambda: model_digests(path, self._check))
                return await _apart(lambda: data_digests(path, request.kind, self._check))
        except (OSError, InvalidInputError):
            self._made.pop(stamp, None)
            raise

    def _check(self) -> None:
        if self._is_closed.is_set():
            raise InterruptedError(errno.EINTR, "the agent stops")


def _named(file: Path, node: str) -> Iterator[_Named]:
    """The paths that a run file names for this node; none where it can't be read."""
    try:
        config = run_file.read(file)
    except InvalidInputError:
        return
    own, table = run_file.on_node(config, node), config.nodes.get(node, NodeTable())
    yield "model", str(Path(own.model.path)), ""
    yield "data", str(Path(own.data.path)), own.data.kind
    if own.data.held_out_path:
        yield "data", str(Path(own.data.held_out_path)), own.data.kind
    if table.cache_path:
        yield "cache", str(Path(table.cache_path)), ""


async def _apart(work: Callable[[], T]) -> T:
    """Return what `work` returns, from a thread for which the end of this process doesn't wait: its disk may hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(method: Callable[[Any], None], outcome: object) -> None:
        if not done.done():
            method(outcome)

    def run() -> None:
        outcome: tuple[Callable[[Any], None], object]
        try:
            outcome = done.set_result, work()
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            outcome = done.set_exception, error
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(settle, *outcome)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return await done


def _disk(rid: str, folder: Path) -> Disk:
    """Measure the disk of a folder, or of the one above it: a run makes its folder of token caches."""
    there = folder if folder.is_dir() else folder.parent
    try:
        speed = speeds.measure_disk(there)
    except OSError as error:
        return Disk(rid=rid, folder=str(there), problem=f"{there}: {error.strerror or error}")
    return Disk(rid=rid, folder=str(there), write_bytes_per_second=speed.write, read_bytes_per_second=speed.read)


def _files(request: DigestsRequest, path: Path) -> list[Path]:
    """Only what a model or data can be made of is ever read. Raises OSError naming what isn't there."""
    if request.what == "model":
        return [path / "config.json", *weight_files(path)]
    found = data_files(path, request.kind)
    if not found:
        raise FileNotFoundError(2, lacks_files(path, request.kind), str(path))
    return found


def _stamp(files: list[Path]) -> _Stamp:
    return tuple((str(file), stat.st_size, stat.st_mtime_ns) for file in files if (stat := file.stat()))
