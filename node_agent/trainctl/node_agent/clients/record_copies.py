"""Copies of runs' records, each as it was at one moment, which clients read in parts."""

import asyncio
import contextlib
import hashlib
import os
import shutil
import sqlite3
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.messages import RECORD_PART_BYTES, RecordPart, RecordRequest
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.schema import open_for_reading, refusing_damage

MAX_COPIES: Final = 4
"""Copies at a time: one more takes the place of the one that nobody has read for longest."""
MAX_BYTES: Final = 8 << 30
"""Largest record that is copied."""
MAX_SECONDS: Final = 120.0
"""Longest time that a copy may take."""
IDLE_SECONDS: Final = 60.0
"""Time after its last part for which a copy stays, so that an interrupted client goes on."""
SPARE_BYTES: Final = 256 << 20
"""Free space that a copy leaves on the disk of the runs."""
_PAGES: Final = 4096
"""Pages that are copied between two looks at the clock."""
_PREFIX: Final = ".record-copy-"


@dataclass
class _Copy:
    """A copy without a name on the disk, so that the system removes it with the agent."""

    run: str
    digest: str
    size: int
    file: IO[bytes]
    read_at: float  # monotonic
    rid: str = ""  # of the request that it was made for, which may come twice


class RecordCopies:
    """The copies that an agent holds for its clients."""

    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}  # by digest
        self._turn = asyncio.Lock()
        self._removal: asyncio.TimerHandle | None = None

    async def part(self, request: RecordRequest, paths: RunPaths) -> RecordPart:
        """Return a part of the copy that is named, or the first part of a new one. Raises InvalidInputError if that
        copy is gone, or none can be made."""
        async with self._turn:
            if request.digest:
                copy = self._copies.get(request.digest)
            else:
                copy = next((copy for copy in self._copies.values() if copy.rid == request.rid), None)
            if copy is None and request.digest:
                raise InvalidInputError("digest", "that copy of the record is gone: ask for a new one")
            if copy is None:
                copy = await asyncio.to_thread(_copy, paths)
                copy.rid = request.rid
                self._keep(copy)
            copy.read_at = time.monotonic()
            data = await asyncio.to_thread(os.pread, copy.file.fileno(), RECORD_PART_BYTES, request.offset_bytes)
        return RecordPart(
            rid=request.rid,
            run=copy.run,
            digest=copy.digest,
            offset_bytes=request.offset_bytes,
            size_bytes=copy.size,
            data=data,
        )

    def _keep(self, copy: _Copy) -> None:
        self._drop(copy.digest)
        while len(self._copies) >= MAX_COPIES:
            self._drop(min(self._copies, key=lambda digest: self._copies[digest].read_at))
        self._copies[copy.digest] = copy
        if self._removal is None:
            self._removal = asyncio.get_running_loop().call_later(IDLE_SECONDS, self._drop_idle)

    def _drop_idle(self) -> None:
        since = time.monotonic() - IDLE_SECONDS
        for copy in [copy for copy in self._copies.values() if copy.read_at <= since]:
            self._drop(copy.digest)
        again = asyncio.get_running_loop().call_later(IDLE_SECONDS / 4, self._drop_idle) if self._copies else None
        self._removal = again

    def _drop(self, digest: str) -> None:
        copy = self._copies.pop(digest, None)
        if copy is not None:
            copy.file.close()

    def close(self) -> None:
        """Remove all copies."""
        if self._removal is not None:
            self._removal.cancel()
        for digest in [*self._copies]:
            self._drop(digest)


def _copy(paths: RunPaths) -> _Copy:
    size = paths.record.stat().st_size if paths.record.is_file() else 0
    if size > MAX_BYTES:
        problem = f"the record has {size:,} bytes, more than the {MAX_BYTES:,} that are sent: read it on its node"
        raise InvalidInputError("run", problem)
    if shutil.disk_usage(paths.directory).free < size + SPARE_BYTES:
        problem = f"no space on the node for a copy of the record, {size:,} bytes: free some, or read it on its node"
        raise InvalidInputError("run", problem)
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX, dir=paths.directory)
    os.close(descriptor)
    place = Path(name)
    try:
        _backup(paths.record, place)
        file = place.open("rb")
    finally:
        for end in ("", "-journal", "-wal", "-shm"):
            Path(f"{place}{end}").unlink(missing_ok=True)
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return _Copy(paths.directory.name, digest, file.seek(0, os.SEEK_END), file, time.monotonic())


def _backup(record: Path, place: Path) -> None:
    """Copy a record as it is now into an empty file. What is written meanwhile isn't in it."""
    end = time.monotonic() + MAX_SECONDS

    def check_time(_status: int, _remaining: int, _total: int) -> None:
        if time.monotonic() > end:
            raise InvalidInputError("run", f"its record was not copied within {MAX_SECONDS:g} s: try again later")

    with (
        refusing_damage(record),
        contextlib.closing(open_for_reading(record)) as source,
        contextlib.closing(sqlite3.connect(place, isolation_level=None)) as target,
    ):
        target.execute("PRAGMA synchronous=OFF")
        source.execute("BEGIN")
        source.execute("SELECT count(*) FROM meta").fetchone()  # from here on it stays as it is for this connection
        source.backup(target, pages=_PAGES, progress=check_time, sleep=0)
        target.execute("PRAGMA journal_mode=DELETE")
