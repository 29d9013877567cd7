"""A trainer's log: whole, its end, or followed as it is written."""

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import msgspec

from trainctl.protocol import messages as m
from trainctl.protocol.errors import InvalidInputError, UnreachableError
from trainctl.tui.cli import output

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

POLL_SECONDS = 0.5
"""How often a followed log is asked for more; the protocol publishes no logs."""
LOG_CHUNK_BYTES = 262144
RETRY_SECONDS = 1.0
ALL_LINES = sys.maxsize


async def rank_of(client: "Client", run: str | None, node: str) -> int:
    """The first rank of a node in the run. Raises InvalidInputError for a node that has none."""
    view = (await client.snapshot(0, run)).run
    ranks = view.ranks if view is not None else ()
    found = next((item.rank for item in ranks if item.node == node), None)
    if found is None:
        known = ", ".join(dict.fromkeys(item.node for item in ranks)) or "no run"
        raise InvalidInputError("--node", f"{node!r} has no rank in this run; there are {known}")
    return found


async def whole_log(client: "Client", run: str | None, rank: int) -> AsyncIterator[m.LogPart]:
    """The log as it is now, in parts."""
    offset = 0
    while True:
        part = await client.log(run, rank, offset, LOG_CHUNK_BYTES)
        yield part
        offset = end_of(part, offset)
        if offset >= part.size_bytes:
            return


async def log_tail(client: "Client", run: str | None, rank: int, last_lines: int) -> m.LogPart:
    """The last lines of the log as one part that reaches to its end."""
    part = await client.log(run, rank, -LOG_CHUNK_BYTES, LOG_CHUNK_BYTES)
    text, start, size = part.text, part.offset_bytes, part.size_bytes
    while start > 0 and text.count("\n") <= last_lines:
        low = max(0, start - LOG_CHUNK_BYTES)
        text = (await client.log(run, rank, low, start - low)).text + text
        start = low
    kept = "".join(text.splitlines(keepends=True)[-last_lines:]) if last_lines else ""
    return msgspec.structs.replace(part, text=kept, offset_bytes=max(0, size - len(kept.encode())), size_bytes=size)


async def follow_log(client: "Client", run: str | None, rank: int, offset: int) -> AsyncIterator[m.LogPart]:
    """What is written to the log past `offset`, as it comes; a shorter file than before is read from its start."""
    while True:
        try:
            part = await client.log(run, rank, offset, LOG_CHUNK_BYTES)
        except UnreachableError as error:
            output.tell(f"{error}; waiting for it")
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if part.size_bytes < offset:
            offset = 0
            continue
        if part.text:
            yield part
        offset = end_of(part, offset)
        if offset >= part.size_bytes:
            await asyncio.sleep(POLL_SECONDS)


def end_of(part: m.LogPart, asked: int) -> int:
    """The offset of the first byte after a part asked for from `asked` on, with LOG_CHUNK_BYTES as the limit.

    Counted from the file's size rather than from the text, whose undecodable bytes were replaced by longer ones.
    """
    return max(asked, min(part.offset_bytes + LOG_CHUNK_BYTES, part.size_bytes))


async def show_logs(
    client: "Client", run: str | None, rank: int, last_lines: int | None, *, follow: bool, json: bool
) -> int:
    """The log, or its last lines, and what is written after that if asked; JSON is one object, or one a part."""
    end = 0
    if last_lines is None and not (json and not follow):
        async for part in whole_log(client, run, rank):
            show_log(part, json=json)
            end = end_of(part, end)
    else:
        part = await log_tail(client, run, rank, ALL_LINES if last_lines is None else last_lines)
        if json and not follow:
            fields = as_json(part)
            output.emit_ok(**{name: fields[name] for name in ("run", "rank", "offset_bytes", "size_bytes", "text")})
        else:
            show_log(part, json=json)
        end = part.size_bytes
    if not end and not json:
        output.tell(f"{await _name_of(client, run, rank)} has written nothing")
    if follow:
        async for part in follow_log(client, run, rank, end):
            show_log(part, json=json)
    return 0


async def _name_of(client: "Client", run: str | None, rank: int) -> str:
    view = (await client.snapshot(0, run)).run
    node = next((item.node for item in (view.ranks if view else ()) if item.rank == rank), "")
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def show_log(part: m.LogPart, *, json: bool) -> None:
    """One part on standard output; control characters are kept for a file and left out on a terminal."""
    if json:
        output.emit(part)
        return
    sys.stdout.write(output.log_text(part.text, raw=not sys.stdout.isatty()))
    sys.stdout.flush()


def as_json(item: msgspec.Struct) -> dict[str, Any]:
    """A message as plain values."""
    fields: dict[str, Any] = msgspec.to_builtins(item)
    return fields
