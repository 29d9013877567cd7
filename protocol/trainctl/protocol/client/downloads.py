"""Copies of files from agents, runs' records and profiles' traces: in parts, verified, and never half."""

import asyncio
import fcntl
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import IO, Any

from trainctl.protocol.errors import RefusedError, UnreachableError
from trainctl.protocol.files.durable_files import naming, rename
from trainctl.protocol.messages import (
    RECORD_PART_BYTES,
    TRACE_PART_BYTES,
    Asker,
    RecordPart,
    RecordRequest,
    TracePart,
    TraceRequest,
)
from trainctl.protocol.messages.events import Profiled
from trainctl.protocol.security import received_names

AT_ONCE = 4
"""Parts of a file that are requested at a time."""
COPY_SECONDS = 150.0
"""Seconds that an agent may take to copy a long record on its disk, before the first part."""
TRIES = 3
"""Times that parts are asked for, or a copy begun, if its agent is out of reach meanwhile or no longer has it."""

AskPart = Callable[[int], Awaitable[RecordPart | TracePart]]
"""An offset in bytes -> the part that begins there; one without data if the sender has no more."""


async def download_record(
    source: Asker, run: str | None, folder: Path, show: Callable[[int, int], None] = lambda done, size: None
) -> Path:
    """Copy a run's record to `folder`/RUN/record.db and return that folder, which a RecordReader opens. `show` is given
    the bytes that are there, and all. If the agent is out of reach meanwhile, it goes on with the parts that lack; if
    the agent no longer has the copy, with a new one.

    Raises RefusedError if it arrives damaged or the agent is of a version that sends none, OSError, and what `source`
    raises."""
    for _ in range(TRIES):
        first = await _begin_record(source, run)
        part = folder / f".{first.digest}.part"

        async def ask(at: int, first: RecordPart = first) -> RecordPart:
            return await source.ask(RecordRequest, first.run, first.digest, at)

        with part.open("w+b") as file:
            file.write(first.data)
            try:
                is_whole = await _append(file, first.size_bytes, RECORD_PART_BYTES, ask, show)
            except RefusedError:  # the agent was restarted, or dropped its copy
                is_whole = False
        if not is_whole:
            part.unlink()
            continue
        if await asyncio.to_thread(_digest, part) != first.digest:
            part.unlink()
            raise RefusedError(f"the record of {first.run} was damaged while it was copied: try again")
        directory = received_names.id_folder(folder, first.run)
        directory.mkdir(exist_ok=True)
        part.replace(directory / "record.db")
        return directory
    raise UnreachableError("the copy of the record was dropped too often: try again later")


async def _begin_record(source: Asker, run: str | None) -> RecordPart:
    try:
        return await source.ask(RecordRequest, run)
    except RefusedError as error:
        if "record-request" not in str(error):
            raise
        problem = "the agent's version of trainctl can't send a record: upgrade it, or run this on its machine"
        raise RefusedError(problem) from None


async def download_trace(
    source: Asker, run: str, trace: Profiled, folder: Path, show: Callable[[int, int], None] = lambda done, size: None
) -> Path:
    """Copy a trace into `folder`, under a name of its own; a complete copy that is there stays. `show` is given the
    bytes that are there, and all. An interrupted copy is continued by the next call.

    Raises InvalidInputError for names that no node gives, RefusedError if it arrives damaged or another program copies
    it, OSError, and what `source` raises."""
    received_names.check(trace.node, trace.file)
    path = folder / f"{trace.node}-{trace.file}"
    await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
    if path.is_file() and await asyncio.to_thread(_digest, path) == trace.digest:
        return path
    part = folder / f".{path.name}.part"

    async def ask(at: int) -> TracePart:
        return await source.ask(TraceRequest, run, trace.node, trace.file, at)

    with naming(part), part.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RefusedError(f"another program is copying {path.name} to {folder}: wait until it is done") from None
        await _append(file, trace.size_bytes, TRACE_PART_BYTES, ask, show)
        file.flush()
        if await asyncio.to_thread(_digest, part) != trace.digest:
            part.unlink()
            raise RefusedError(f"{path.name} was damaged while it was copied, or {trace.node} has another: try again")
        await asyncio.to_thread(rename, part, path)
    return path


async def _append(
    file: IO[Any], size_bytes: int, part_bytes: int, ask: AskPart, show: Callable[[int, int], None]
) -> bool:
    """Append the parts that a file lacks, and return whether it has all. Raises UnreachableError if the sender is out
    of reach `TRIES` times, and what else `ask` raises."""
    done, tries = file.seek(0, 2), 0
    while done < size_bytes:
        places = range(done, min(size_bytes, done + AT_ONCE * part_bytes), part_bytes)
        try:
            parts = await asyncio.gather(*map(ask, places))
        except UnreachableError:
            tries += 1
            if tries == TRIES:
                raise
            continue
        for part in parts:
            if not part.data:
                return False
            done += file.write(part.data)
        show(done, size_bytes)
    return True


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
