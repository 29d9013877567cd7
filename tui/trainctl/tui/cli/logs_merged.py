"""`trainctl logs --all`: the logs of all of a run's ranks merged by time, line by line, and followed."""

import asyncio
import datetime
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainctl.protocol.errors import InvalidInputError, RefusedError, TrainctlError
from trainctl.tui.cli import output
from trainctl.tui.state import log_query as lq
from trainctl.tui.state import merged_log as lt
from trainctl.tui.text.styled_line import clean

if TYPE_CHECKING:
    from trainctl.protocol.client.client import Client

POLL_SECONDS = 0.5
MOST_LINES = 100_000
"""Kept of whole logs; what is older is left out, and that is said."""


def wanted(grep: str | None) -> lq.Query:
    """What lines are to have. Raises InvalidInputError for a pattern that is none."""
    query = lq.parse(grep or "")
    if query.problem:
        raise InvalidInputError("--grep", query.problem)
    return query


async def show(
    client: "Client", run: str | None, rank: int | None, last: int | None, query: lq.Query, *, follow: bool, json: bool
) -> int:
    """Prints the lines of a rank, or of all (None); with `follow` also those to come. JSON is one object, or with
    `follow` one a line. Raises RefusedError where there is no run."""
    view = (await client.snapshot(0, run)).run
    if view is None:
        raise RefusedError("no run yet, so no logs")
    ranks = {item.rank: item.node for item in view.ranks if rank in (None, item.rank)}
    if rank is not None and rank not in ranks:
        ranks = {rank: ""}  # the agent says that there is none
    reading = _Reading(client, view.run, ranks)
    await reading.catch_up(only_one=rank is not None)
    if len(reading.tail.entries) >= MOST_LINES:
        output.tell(f"only the newest {MOST_LINES:,} lines are kept; what is older is in the runs' logs/")
    shown = lq.kept(reading.tail.entries, query, only=True)
    shown = shown if last is None else shown[len(shown) - min(last, len(shown)) :]
    if json and not follow:
        output.emit_ok(run=view.run, lines=[as_json(entry) for entry in shown], unread=dict(reading.tail.problems))
        return 0
    size = max(len(node) for node in ranks.values())
    _print(shown, size, json=json)
    reading.tell()
    if not shown and not follow and not json:
        output.tell("no line is of that" if reading.tail.entries else "nothing has been written")
    while follow:
        await asyncio.sleep(POLL_SECONDS)
        _print(lq.kept(await reading.news(), query, only=True), size, json=json)
        reading.tell()
    return 0


class _Reading:
    """Some ranks' logs, as far as they have been read."""

    def __init__(self, client: "Client", run: str, ranks: Mapping[int, str]) -> None:
        self._client, self._ranks = client, ranks
        self.tail = lt.from_start(run, ranks, MOST_LINES)
        self._told: dict[int, str] = {}

    async def catch_up(self, *, only_one: bool) -> None:
        """Reads all there is. Raises what the agent says of a rank that alone is asked for."""
        await asyncio.gather(*(self._read(rank, only_one=only_one) for rank in self._ranks))

    async def _read(self, rank: int, *, only_one: bool = False) -> None:
        while True:
            try:
                part = await self._client.log(self.tail.run, rank, self.tail.next_offset(rank), lt.PART_BYTES)
            except TrainctlError as error:
                if only_one:
                    raise
                self.tail = lt.failed(self.tail, rank, str(error))
                return
            now = datetime.datetime.now(datetime.UTC).timestamp()
            self.tail = lt.take(self.tail, self._ranks[rank], rank, part, lt.PART_BYTES, now)
            if not self.tail.files[rank].behind_bytes and not self.tail.files[rank].rest:
                return

    async def news(self) -> list[lt.Entry]:
        """What came since, in order of time."""
        before = {rank: file.lines for rank, file in self.tail.files.items()}
        await self.catch_up(only_one=False)
        return [entry for entry in self.tail.entries if entry.key.number >= before.get(entry.key.rank, 0)]

    def tell(self) -> None:
        """Names on standard error whose log can't be read, once for each reason."""
        for rank, why in self.tail.problems.items():
            if self._told.get(rank) != why:
                output.tell(f"{clean(self._ranks[rank])}: {why}")
        self._told = dict(self.tail.problems)


def _print(entries: Sequence[lt.Entry], size: int, *, json: bool) -> None:
    for entry in entries:
        if json:
            output.emit(as_json(entry))
        else:
            output.say(text_of(entry, size))


def as_json(entry: lt.Entry) -> dict[str, Any]:
    """A line as plain values; `at` of one without a time of its own is that of the line it goes with."""
    return {
        "type": "log-line", "at": entry.key.at, "node": entry.node, "rank": entry.key.rank, "level": entry.level,
        "text": entry.text, "stray": entry.stray,
    }  # fmt: skip


def text_of(entry: lt.Entry, size: int) -> str:
    """A line for a person: when by this machine's clock, whose, how grave, and what."""
    when = datetime.datetime.fromtimestamp(entry.key.at).astimezone()
    words = " " * 19 if entry.stray else f"{when:%Y-%m-%d %H:%M:%S}"
    level = "" if entry.stray else entry.level
    return f"{words} {clean(entry.node).ljust(size)} {level.ljust(7)} {clean(entry.text)}"
