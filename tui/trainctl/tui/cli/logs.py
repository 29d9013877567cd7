"""`trainctl logs`: a trainer's log as it was written; or, with `--all` or `--grep`, lines merged by time."""

import asyncio
import datetime
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError, UnreachableError
from trainctl.protocol.messages import LogPart, LogRequest, SnapshotRequest
from trainctl.tui.cli import agent_call, output, runs
from trainctl.tui.cli.options import ClusterFile, Connect, JsonLines, complete_nodes, subcommands
from trainctl.tui.cli.runs import RunAtAgent
from trainctl.tui.state.filter_language import Filter, TypedLineError, parse
from trainctl.tui.state.merged_log import PART_BYTES, LogEntry, failed, from_start, take
from trainctl.tui.state.table_schemas import LOGS
from trainctl.tui.text.styled_line import clean

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

app = subcommands()
POLL_SECONDS = 0.5
"""Seconds between two questions for more of a followed log; the protocol publishes no logs."""
LOG_CHUNK_BYTES = 262144
MOST_LINES = 100_000
"""Kept of whole logs; what is older is left out, and that is said."""
RETRY_SECONDS = 1.0
ALL_LINES = sys.maxsize


async def rank_of(client: "Client", run: str | None, node: str) -> int:
    """Return the first rank of a node in the run. Raises InvalidInputError for a node that has none."""
    view = (await client.ask(SnapshotRequest, 0, run)).run
    ranks = view.ranks if view is not None else ()
    found = next((item.rank for item in ranks if item.node == node), None)
    if found is None:
        known = ", ".join(dict.fromkeys(item.node for item in ranks)) or "no run"
        raise InvalidInputError("--node", f"{node!r} has no rank in this run; the nodes are {known}")
    return found


async def log_tail(client: "Client", run: str | None, rank: int, last_lines: int) -> LogPart:
    """Return the last lines of the log as one part that reaches to its last whole character."""
    part = await client.ask(LogRequest, run, rank, -LOG_CHUNK_BYTES, LOG_CHUNK_BYTES)
    text, start, size = part.text, part.offset_bytes, part.size_bytes
    while start > 0 and text.count("\n") <= last_lines:
        low = max(0, start - LOG_CHUNK_BYTES)
        before = await client.ask(LogRequest, run, rank, low, start - low)
        text, start = before.text + text, before.offset_bytes
    kept = "".join(text.splitlines(keepends=True)[-last_lines:]) if last_lines else ""
    end = size if part.end_bytes is None else part.end_bytes
    return msgspec.structs.replace(part, text=kept, offset_bytes=max(0, end - len(kept.encode())))


async def parts_of(
    client: "Client", run: str | None, rank: int, offset: int = 0, *, follow: bool = False
) -> AsyncIterator[LogPart]:
    """Yield the log past `offset`; with `follow` also what comes, and a file that has become shorter from its start."""
    while True:
        try:
            part = await client.ask(LogRequest, run, rank, offset, LOG_CHUNK_BYTES)
        except UnreachableError as error:
            if not follow:
                raise
            output.tell(f"{error}; waiting for it")
            await asyncio.sleep(RETRY_SECONDS)
            continue
        if follow and part.size_bytes < offset:
            offset = 0
            continue
        if part.text or not follow:
            yield part
        before, offset = offset, end_of(part, offset)
        if offset >= part.size_bytes or offset == before:
            if not follow:
                return
            await asyncio.sleep(POLL_SECONDS)


def end_of(part: LogPart, asked: int) -> int:
    """Return the offset of the first byte after the part requested at `asked`, limited to LOG_CHUNK_BYTES.

    An agent that doesn't say where it ends cuts by bytes: in the text, longer characters replace undecodable bytes.
    """
    if part.end_bytes is not None:
        return part.end_bytes
    return max(asked, min(part.offset_bytes + LOG_CHUNK_BYTES, part.size_bytes))


async def show_logs(
    client: "Client", run: str | None, rank: int, last_lines: int | None, *, follow: bool, json: bool
) -> int:
    """Print the log, or its last lines, and what is written after that if asked; JSON is one object, or one a part."""
    end = 0
    if last_lines is None and not (json and not follow):
        async for part in parts_of(client, run, rank):
            show_log(part, json=json)
            end = end_of(part, end)
    else:
        part = await log_tail(client, run, rank, ALL_LINES if last_lines is None else last_lines)
        if json and not follow:
            fields = msgspec.to_builtins(part)
            output.emit_ok(**{name: fields[name] for name in ("run", "rank", "offset_bytes", "size_bytes", "text")})
        else:
            show_log(part, json=json)
        end = part.size_bytes if part.end_bytes is None else part.end_bytes
    if not end and not json:
        output.tell(f"{await _name_of(client, run, rank)} has written nothing")
    if follow:
        async for part in parts_of(client, run, rank, end, follow=True):
            show_log(part, json=json)
    return 0


async def _name_of(client: "Client", run: str | None, rank: int) -> str:
    view = (await client.ask(SnapshotRequest, 0, run)).run
    node = next((item.node for item in (view.ranks if view else ()) if item.rank == rank), "")
    return f"rank {rank} on {node}" if node else f"rank {rank}"


def show_log(part: LogPart, *, json: bool) -> None:
    """Print one part of a log; control characters are removed if standard output is a terminal."""
    with output.read_to_its_end():
        if json:
            output.emit(part)
            return
        sys.stdout.write(output.log_text(part.text, raw=not sys.stdout.isatty()))
        sys.stdout.flush()


# ---------------------------------------------------------------- merged by time


def query_of(grep: str | None) -> Filter[LogEntry]:
    """Return the filter of lines for the value of `--grep`. Raises InvalidInputError for an invalid one."""
    try:
        return parse(grep or "", LOGS)
    except TypedLineError as error:
        raise InvalidInputError("--grep", str(error)) from None


async def show_merged(
    client: "Client",
    run: str | None,
    rank: int | None,
    last: int | None,
    query: Filter[LogEntry],
    *,
    follow: bool,
    json: bool,
) -> int:
    """Prints the lines of a rank, or of all (None); with `follow` also those to come. JSON is one object, or with
    `follow` one a line. Raises RefusedError where there is no run."""
    view = (await client.ask(SnapshotRequest, 0, run)).run
    if view is None:
        raise RefusedError("no run yet, so no logs: start one with trainctl run RUN.toml")
    ranks = {item.rank: item.node for item in view.ranks if rank in (None, item.rank)}
    if rank is not None and rank not in ranks:
        ranks = {rank: ""}  # the agent says that there is none
    reading = _Logs(client, view.run, ranks)
    await reading.catch_up(only_one=rank is not None)
    if len(reading.tail.entries) >= MOST_LINES:
        output.tell(f"only the newest {MOST_LINES:,} lines are kept; older ones are in the run's logs/ folder")
    shown = query.kept(reading.tail.entries)
    shown = shown if last is None else shown[len(shown) - min(last, len(shown)) :]
    if json and not follow:
        output.emit_ok(run=view.run, lines=[line_as_json(entry) for entry in shown], unread=dict(reading.tail.problems))
        return 0
    size = max(len(node) for node in ranks.values())
    _print(shown, size, json=json)
    reading.tell()
    if not shown and not follow and not json:
        output.tell("no matching lines" if reading.tail.entries else "nothing has been written yet")
    while follow:
        await asyncio.sleep(POLL_SECONDS)
        _print(query.kept(await reading.news()), size, json=json)
        reading.tell()
    return 0


class _Logs:
    """Some ranks' logs, as far as they have been read."""

    def __init__(self, client: "Client", run: str, ranks: Mapping[int, str]) -> None:
        self._client, self._ranks = client, ranks
        self.tail = from_start(run, ranks, MOST_LINES)
        self._told: dict[int, str] = {}

    async def catch_up(self, *, only_one: bool) -> None:
        """Reads all there is. Raises what the agent says about a rank that alone is asked for."""
        await asyncio.gather(*(self._read(rank, only_one=only_one) for rank in self._ranks))

    async def _read(self, rank: int, *, only_one: bool = False) -> None:
        while True:
            try:
                part = await self._client.ask(LogRequest, self.tail.run, rank, self.tail.next_offset(rank), PART_BYTES)
            except TrainctlError as error:
                if only_one:
                    raise
                self.tail = failed(self.tail, rank, str(error))
                return
            now = datetime.datetime.now(datetime.UTC).timestamp()
            self.tail = take(self.tail, self._ranks[rank], rank, part, PART_BYTES, now)
            if not self.tail.files[rank].behind_bytes and not self.tail.files[rank].rest:
                return

    async def news(self) -> list[LogEntry]:
        """Return what came since, in order of time."""
        before = {rank: file.lines for rank, file in self.tail.files.items()}
        await self.catch_up(only_one=False)
        return [entry for entry in self.tail.entries if entry.number >= before.get(entry.rank, 0)]

    def tell(self) -> None:
        """Report each log that can't be read on standard error, once per reason."""
        for rank, why in self.tail.problems.items():
            if self._told.get(rank) != why:
                output.tell(f"{clean(self._ranks[rank])}: {why}")
        self._told = dict(self.tail.problems)


def _print(entries: Sequence[LogEntry], size: int, *, json: bool) -> None:
    with output.read_to_its_end():
        for entry in entries:
            if json:
                output.emit(line_as_json(entry))
            else:
                output.say(text_of(entry, size))


def line_as_json(entry: LogEntry) -> dict[str, Any]:
    """Return a line as plain values. A line without its own time has the `at` of the line it belongs to."""
    return {
        "type": "log-line",
        "at": entry.at,
        "node": entry.node,
        "rank": entry.rank,
        "level": entry.level,
        "text": entry.text,
        "stray": entry.stray,
    }


def text_of(entry: LogEntry, size: int) -> str:
    """Return a line for people: local time, node, severity and text."""
    when = datetime.datetime.fromtimestamp(entry.at).astimezone()
    words = " " * 19 if entry.stray else f"{when:%Y-%m-%d %H:%M:%S}"
    level = "" if entry.stray else entry.level
    return f"{words} {clean(entry.node).ljust(size)} {level.ljust(7)} {clean(entry.text)}"


# ---------------------------------------------------------------- the subcommand


@app.command()
def logs(
    ctx: typer.Context,
    run: RunAtAgent = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing new lines.")] = False,
    rank: Annotated[
        int | None, typer.Option("--rank", min=0, help="Rank whose log to print.", show_default="0")
    ] = None,
    node: Annotated[
        str | None, typer.Option("--node", help="Node whose log to print.", autocompletion=complete_nodes)
    ] = None,
    everyone: Annotated[bool, typer.Option("--all", help="Print all nodes' logs, merged by time.")] = False,
    grep: Annotated[
        str | None,
        typer.Option(
            "--grep",
            metavar="FILTER",
            help="Print only lines that match a filter as on the screen: a word, 'level:error node:mbp', '~PATTERN'.",
        ),
    ] = None,
    last: Annotated[
        int | None, typer.Option("--last", "-n", min=0, help="Number of last lines to print.", show_default="all")
    ] = None,
    connect: Connect = None,
    cluster: ClusterFile = None,
    json: JsonLines = False,
) -> int:
    """Print a trainer's log, or with --all every node's log merged by time."""
    if (rank is not None) + (node is not None) + everyone > 1:
        raise InvalidInputError("--node", "--rank, --node and --all can't be combined: give only one")
    wanted, at = query_of(grep), runs.at_agent(ctx, connect, cluster, run)

    async def show(client: Any) -> int:
        if everyone or grep is not None:
            whose = None if everyone else await rank_of(client, at.run, node) if node is not None else rank or 0
            return await show_merged(client, at.run, whose, last, wanted, follow=follow, json=json)
        chosen = await rank_of(client, at.run, node) if node is not None else rank or 0
        return await show_logs(client, at.run, chosen, last, follow=follow, json=json)

    return agent_call.call(at.address, show, lead=everyone and run is None)
