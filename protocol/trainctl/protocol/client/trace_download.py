"""Copies of profiles' traces: in parts from the node that has one, continued after an interruption, and never half."""

import asyncio
import fcntl
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from trainctl.protocol.errors import RefusedError
from trainctl.protocol.files.durable_files import naming, rename
from trainctl.protocol.messages import TRACE_PART_BYTES, Asker, TraceRequest
from trainctl.protocol.messages.events import Profiled
from trainctl.protocol.security import received_names

AT_ONCE = 4
"""Parts of a file that are requested at a time."""


def path_of(trace: Profiled, folder: Path) -> Path:
    """Return where the copy is. Raises InvalidInputError for names that no node gives."""
    received_names.check(trace.node, trace.file)
    return folder / f"{trace.node}-{trace.file}"


async def download(
    source: Asker, run: str, trace: Profiled, folder: Path, show: Callable[[int], None] = lambda done: None
) -> Path:
    """Copy a trace into `folder`, under a name of its own; a complete copy that is there stays. `show` is given the
    bytes that are there. An interrupted copy is continued by the next call.

    Raises RefusedError if it arrives damaged or another program copies it, OSError, and what `source` raises."""
    path = path_of(trace, folder)
    if await asyncio.to_thread(_is_there, path, trace):
        return path
    part = folder / f".{path.name}.part"
    with naming(part), part.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"another program is copying {path.name} to {folder}: wait until it is done") from None
        await _fill(file, source, run, trace, show)
        file.flush()
        if await asyncio.to_thread(_digest, part) != trace.digest:
            part.unlink()
            raise RefusedError(f"{path.name} was damaged while it was copied, or {trace.node} has another: try again")
        await asyncio.to_thread(rename, part, path)
    return path


async def _fill(file: IO[Any], source: Asker, run: str, trace: Profiled, show: Callable[[int], None]) -> None:
    """Append what is missing."""
    done = file.seek(0, 2)
    while done < trace.size_bytes:
        places = range(done, min(trace.size_bytes, done + AT_ONCE * TRACE_PART_BYTES), TRACE_PART_BYTES)
        for part in await asyncio.gather(*(source.ask(TraceRequest, run, trace.node, trace.file, at) for at in places)):
            if not part.data:
                return
            file.write(part.data)
            done += len(part.data)
        show(done)


def _is_there(path: Path, trace: Profiled) -> bool:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.is_file() and _digest(path) == trace.digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
