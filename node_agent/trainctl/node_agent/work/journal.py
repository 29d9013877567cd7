"""The journal of one separate work, in a folder of its own: its rows, which slices were dealt, and the results.

A slice is journaled before it is sent, and its results in one transaction when they arrive. A lead that restarts
continues from here. Beside it stands the work as it is open: its dealer and what is known of its nodes.
"""

import asyncio
import hashlib
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from trainctl.node_agent.work.checkpoint_files import Chosen
from trainctl.node_agent.work.dealer import Dealer, Slice
from trainctl.protocol.config.run_tables import RunFile
from trainctl.protocol.errors import InvalidInputError
from trainctl.protocol.files.durable_files import flush, make_folder
from trainctl.protocol.messages import OpenWork, WorkNode, WorkState, WorkSummary, WorkView
from trainctl.protocol.record.paths import RunPaths
from trainctl.protocol.record.schema import open_for_writing

JOURNAL_NAME = "work.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS slices (
  id INTEGER PRIMARY KEY, first INTEGER NOT NULL, count INTEGER NOT NULL, node TEXT NOT NULL, answered_by TEXT
);
CREATE TABLE IF NOT EXISTS results (row INTEGER PRIMARY KEY, body BLOB NOT NULL);
"""


class Opened(msgspec.Struct, frozen=True):
    """Work as it was opened."""

    request: OpenWork
    step: int  # of the checkpoint
    nodes: tuple[str, ...]


class Journal:
    """Open while the work is. Raises InvalidInputError if the files can't be used."""

    def __init__(self, folder: Path, opened: Opened | None = None) -> None:
        """`opened`: for new work; None: the journal has it."""
        self.folder, self.paths = folder, RunPaths(folder)
        self._rows_path = folder / "rows.jsonl"
        try:
            make_folder(folder)
            self._rows = self._rows_path.open("a+b")
        except OSError as error:
            raise InvalidInputError(str(folder), f"cannot be written: {error.strerror}") from None
        self._connection = open_for_writing(folder / JOURNAL_NAME, _SCHEMA)
        if opened is not None:
            self._set("opened", msgspec.json.encode(opened).decode())
            self.state = "receiving"
        kept = self._get("opened")
        if kept is None:
            self.close()
            raise InvalidInputError(str(folder), "the journal is empty")
        self.opened = msgspec.json.decode(kept, type=Opened)
        self._starts: list[int] = []  # where each row begins; the last entry is where the last one ends

    def close(self) -> None:
        self._connection.close()
        self._rows.close()

    @property
    def state(self) -> WorkState:
        state: WorkState = msgspec.convert(self._get("state") or "receiving", WorkState)
        return state

    @state.setter
    def state(self, state: WorkState) -> None:
        self._set("state", state)

    @property
    def reason(self) -> str:
        """Return why the work failed; empty if it didn't."""
        return self._get("reason") or ""

    def fail(self, reason: str) -> None:
        self._set("reason", reason)
        self.state = "failed"

    # ------------------------------------------------------------ rows

    @property
    def received_bytes(self) -> int:
        return self._rows_path.stat().st_size

    def receive(self, offset_bytes: int, data: bytes) -> None:
        """Add a part of the rows if it follows the received ones. Raises InvalidInputError for more than was
        announced."""
        if offset_bytes != self.received_bytes:
            return
        if offset_bytes + len(data) > self.opened.request.size_bytes:
            raise InvalidInputError("data", "there are more rows than the work was opened with")
        self._rows.write(data)
        self._rows.flush()

    @property
    def is_whole(self) -> bool:
        return self.received_bytes == self.opened.request.size_bytes

    def seal(self) -> list[int]:
        """Have the disk keep all rows once they have arrived, and return the size of each. Raises InvalidInputError if
        they aren't those announced, or the disk fails."""
        try:
            flush(self._rows.fileno())
        except OSError as error:
            raise InvalidInputError("data", f"the rows cannot be kept: {error.strerror}") from None
        digest, starts, place = hashlib.sha256(), [0], 0
        with self._rows_path.open("rb") as rows:
            for line in rows:
                digest.update(line)
                place += len(line)
                starts.append(place)
        wanted = self.opened.request
        if digest.hexdigest() != wanted.digest or len(starts) != wanted.rows + 1:
            raise InvalidInputError("digest", "the received rows differ from those announced; send them again")
        self._starts = starts
        return [stop - start for start, stop in itertools.pairwise(starts)]

    def rows(self, one: Slice) -> tuple[str, ...]:
        """The rows of a slice."""
        start = self._starts[one.first]
        self._rows.seek(start)
        lines = self._rows.read(self._starts[one.first + one.rows] - start).decode().split("\n")
        return tuple(lines[: one.rows])

    # ------------------------------------------------------------ slices and results

    def dealt(self, one: Slice, node: str) -> None:
        """A slice is about to be sent to a node, perhaps again."""
        self._connection.execute(
            "INSERT INTO slices (id, first, count, node) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET node = excluded.node",
            (one.id, one.first, one.rows, node),
        )

    def answered(self, one: Slice, node: str, results: Sequence[bytes]) -> None:
        """Keep a slice's results, one per row."""
        rows = [(one.first + number, body) for number, body in enumerate(results)]
        self._connection.execute("BEGIN IMMEDIATE")
        self._connection.executemany("INSERT INTO results (row, body) VALUES (?, ?)", rows)
        self._connection.execute("UPDATE slices SET answered_by = ? WHERE id = ?", (node, one.id))
        self._connection.execute("COMMIT")

    def slices(self) -> Iterator[tuple[Slice, bool]]:
        """Yield the slices dealt so far, in order, and whether each was answered."""
        query = "SELECT id, first, count, answered_by IS NOT NULL FROM slices ORDER BY id"
        for number, first, count, is_answered in self._connection.execute(query).fetchall():
            yield Slice(number, first, count), bool(is_answered)

    def results(self, after: int, limit: int, most_bytes: int) -> tuple[bytes, ...]:
        """Results in row order from row index `after` on, up to the first that is missing."""
        query = "SELECT row, body FROM results WHERE row >= ? ORDER BY row LIMIT ?"
        found: list[bytes] = []
        size = 0
        for row, body in self._connection.execute(query, (after, limit)):
            size += len(body) + 8
            if row != after + len(found) or (found and size > most_bytes):
                break
            found.append(body)
        return tuple(found)

    def _get(self, key: str) -> str | None:
        row = self._connection.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def _set(self, key: str, value: str) -> None:
        self._connection.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))


MOST_FAILURES = 3
"""Workers that may end on a node without an answer; after that the node is left out."""


@dataclass
class WorkingNode:
    """State of one node, as the lead knows it."""

    heard: float = float("-inf")  # by time.monotonic
    device: str = ""
    why: str = ""
    state: Literal["starting", "working", "silent", "failed"] = "starting"
    failures: int = 0  # workers that ended since the last answer
    asked: float = float("-inf")  # when it was asked to start its worker
    asking: "asyncio.Task[None] | None" = None

    @property
    def is_out(self) -> bool:
        return self.failures >= MOST_FAILURES


@dataclass
class OpenedWork:
    """The work that is open."""

    journal: Journal
    config: RunFile
    chosen: Chosen
    nodes: dict[str, WorkingNode]
    dealer: Dealer | None = None  # None: not all rows have arrived
    heard: float = field(default_factory=time.monotonic)  # when any node was heard

    @property
    def id(self) -> str:
        return self.journal.opened.request.work

    @property
    def is_active(self) -> bool:
        return self.journal.state in ("receiving", "running")

    def view(self) -> WorkView:
        """The state that clients get."""
        opened, journal, dealer = self.journal.opened, self.journal, self.dealer
        nodes = [
            WorkNode(
                node=name,
                state=node.state,
                device=node.device,
                rows=dealer.rows_of(name) if dealer else 0,
                rows_per_second=dealer.speed(name) if dealer else None,
                why=node.why,
            )
            for name, node in self.nodes.items()
        ]
        return WorkView(
            work=self.id,
            kind=opened.request.kind,
            run=opened.request.run,
            checkpoint=opened.step,
            state=journal.state,
            rows=opened.request.rows,
            answered=dealer.answered_rows if dealer else 0,
            received_bytes=journal.received_bytes,
            nodes=tuple(nodes),
            reason=journal.reason,
        )

    def summary(self, lead: str) -> WorkSummary:
        """Return the work's line of a list; `lead` is this node."""
        view, dealer = self.view(), self.dealer
        speed = sum(node.rows_per_second or 0.0 for node in view.nodes if node.state == "working")
        speed_now = speed if speed and self.is_active else None
        return WorkSummary(
            lead=lead,
            view=view,
            file=self.journal.opened.request.file,
            slices=dealer.slices if dealer else 0,
            slices_answered=dealer.slices_answered if dealer else 0,
            rows_per_second=speed_now,
            seconds_left=(view.rows - view.answered) / speed_now if speed_now else None,
        )
