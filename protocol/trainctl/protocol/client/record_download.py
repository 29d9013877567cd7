"""Copies of runs' records from their agents: as they were at one moment, in parts, verified, and never half."""

import asyncio
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from trainctl.protocol.errors import RefusedError, UnreachableError
from trainctl.protocol.messages import RECORD_PART_BYTES, Asker, RecordPart, RecordRequest
from trainctl.protocol.security import received_names

AT_ONCE = 4
"""Parts that are requested at a time."""
COPY_SECONDS = 150.0
"""Seconds that an agent may take to copy a long record on its disk, before the first part."""
TRIES = 3
"""Times that a copy is tried, if its agent is out of reach meanwhile or no longer has it."""


async def download_record(
    source: Asker, run: str | None, folder: Path, show: Callable[[int, int], None] = lambda done, size: None
) -> Path:
    """Copy a run's record to `folder`/RUN/record.db and return that folder, which a RecordReader opens. `show` is given
    the bytes that are there, and all. If the agent is out of reach meanwhile, it goes on with the parts that lack; if
    the agent no longer has the copy, with a new one.

    Raises RefusedError if it arrives damaged or the agent is of a version that sends none, OSError, and what `source`
    raises."""
    for _ in range(TRIES):
        first = await _first(source, run)
        part = folder / f".{first.digest}.part"
        with part.open("w+b") as file:
            file.write(first.data)
            if not await _fill(file, source, first, show):
                part.unlink()
                continue
            file.seek(0)
            digest = await asyncio.to_thread(hashlib.file_digest, file, "sha256")
        if digest.hexdigest() != first.digest:
            part.unlink()
            raise RefusedError(f"the record of {first.run} was damaged while it was copied: try again")
        directory = received_names.id_folder(folder, first.run)
        directory.mkdir(exist_ok=True)
        part.replace(directory / "record.db")
        return directory
    raise UnreachableError("the agent was out of reach too often while it sent the record: try again later")


async def _first(source: Asker, run: str | None) -> RecordPart:
    """Return the first part of a new copy."""
    try:
        return await source.ask(RecordRequest, run)
    except RefusedError as error:
        if "record-request" not in str(error):
            raise
        problem = "the agent's version of trainctl can't send a record: upgrade it, or run this on its machine"
        raise RefusedError(problem) from None


async def _fill(file: IO[Any], source: Asker, first: RecordPart, show: Callable[[int, int], None]) -> bool:
    """Append all parts but the first; return False if the agent doesn't have the copy any more."""
    done, tries = len(first.data), 0
    while done < first.size_bytes:
        places = range(done, min(first.size_bytes, done + AT_ONCE * RECORD_PART_BYTES), RECORD_PART_BYTES)
        try:
            asked = (source.ask(RecordRequest, first.run, first.digest, at) for at in places)
            parts = await asyncio.gather(*asked)
        except UnreachableError:
            tries += 1
            if tries == TRIES:
                raise
            continue
        except RefusedError:
            return False
        for part in parts:
            file.seek(part.offset_bytes)
            file.write(part.data)
        if not all(part.data for part in parts):
            return False
        done = file.seek(0, os.SEEK_END)
        show(done, first.size_bytes)
    return True
