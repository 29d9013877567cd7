"""A reference's log-probabilities in the run that this agent leads: ranks that load ask for units to compute, and for
all values.

What this node has in its caches from an earlier run is handed on as it is. What it lacks, the ranks compute, or have
themselves from an earlier run. So all ranks end up with the same bits. Slices are dealt as those of other separate work
are. Values that follow the first one without a gap can be handed on at once, so ranks fetch those of others while they
compute.

A slice is journaled before it is sent, and its values are on disk before it counts as answered. A lead that restarts
continues from the journal.
"""

import asyncio
import hashlib
import os
import shutil
import sqlite3
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from trainctl.node_agent.conductor.events import Computing
from trainctl.node_agent.runs.session import Session
from trainctl.node_agent.work.dealer import Dealer, Slice
from trainctl.protocol.config import run_file
from trainctl.protocol.errors import TrainctlError
from trainctl.protocol.files.durable_files import flush, make_folder
from trainctl.protocol.messages import ReferenceAsk, ReferenceSlice
from trainctl.protocol.record.paths import VALUES_NAME, stored_digest
from trainctl.protocol.record.schema import open_for_writing
from trainctl.protocol.security import received_names

VALUE_BYTES = 4
MOST_UNITS = 1024
"""Units of a slice at most."""
SLICES_NAME = "slices.db"
PART_VALUES = 12 * 1024
"""Values in one answer: what is relayed to another node's agent may have 64 KiB."""
SILENT_SECONDS = 8.0
"""Silence of a rank after which its slice is dealt again; it sends a heartbeat every second."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sizes (counts BLOB NOT NULL, tokens BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS slices (
  id INTEGER PRIMARY KEY, first INTEGER NOT NULL, units INTEGER NOT NULL, rank INTEGER NOT NULL, answered INTEGER
);
"""


@dataclass(frozen=True)
class UnitSizes:
    """Sizes of each unit, as a rank sends them: little-endian uint32."""

    counts: bytes  # values
    tokens: bytes  # tokens to process

    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Raises ValueError if they are no two lists of the same length."""
        counts, tokens = (struct.unpack(f"<{len(raw) // 4}I", raw) for raw in (self.counts, self.tokens))
        if len(counts) != len(tokens):
            raise ValueError(f"{len(counts)} counts for {len(tokens)} units")
        return counts, tokens


class ReferencePass:
    """Times are seconds by any clock that only grows; ranks are workers by their number."""

    def __init__(self, counts: Sequence[int], tokens: Sequence[int], dealt: Iterable[tuple[Slice, bool]] = ()) -> None:
        """`dealt`: slices of an earlier agent, in order, and whether each was answered."""
        known = [*dealt]
        self._starts = [0, *accumulate(counts)]
        self._dealer = Dealer([VALUE_BYTES * size for size in tokens], MOST_UNITS, known)
        self._answered = {one.first: one.first + one.rows for one, done in known if done}
        self._whole = 0  # units from the first one on that all have values
        self._grow()

    @property
    def values(self) -> int:
        """All there will be."""
        return self._starts[-1]

    @property
    def available(self) -> int:
        """Values from the first one on that are there without a gap."""
        return self._starts[self._whole]

    @property
    def answered(self) -> int:
        """Units that have values."""
        return self._dealer.answered_rows

    @property
    def is_done(self) -> bool:
        return self._dealer.is_done

    def deal(self, rank: int, now: float) -> Slice | None:
        """The slice for a rank that asks; None if there is nothing to do now."""
        return self._dealer.deal(str(rank), now)

    def is_new(self, one: Slice) -> bool:
        """Return whether it is a slice of this pass without an answer. Those of another lead differ."""
        return self._dealer.pending(one.id) == one

    def span(self, one: Slice) -> tuple[int, int]:
        """The first of a slice's values, and how many there are."""
        start = self._starts[one.first]
        return start, self._starts[one.first + one.rows] - start

    def answer(self, rank: int, one: Slice, now: float) -> None:
        """A rank has computed a slice; if it is new, its values are kept."""
        if self.is_new(one):
            self._dealer.answer(str(rank), one.id, now)
            self._answered[one.first] = one.first + one.rows
            self._grow()
        elif self._dealer.held(str(rank)) == one:
            self.lose(rank)  # another rank, to which it was dealt as well, was first

    def lose(self, rank: int) -> None:
        """A rank has ended or is silent: its slice is dealt again."""
        self._dealer.lose(str(rank))

    def _grow(self) -> None:
        while self._whole in self._answered:
            self._whole = self._answered.pop(self._whole)


class ReferenceJournal:
    """Open while its run is led here. Raises OSError and sqlite3.Error where the disk refuses."""

    def __init__(self, folder: Path, sizes: UnitSizes | None = None) -> None:
        """`sizes`: of a new pass; None: the journal has them."""
        make_folder(folder)
        self.folder, self._path = folder, folder / VALUES_NAME
        self._connection = open_for_writing(folder / SLICES_NAME, _SCHEMA)
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError:
            self._connection.close()
            raise
        if sizes is not None:
            self._connection.execute("INSERT INTO sizes VALUES (?, ?)", (sizes.counts, sizes.tokens))
        row = self._connection.execute("SELECT counts, tokens FROM sizes").fetchone()
        self.sizes = UnitSizes(*row) if row is not None else UnitSizes(b"", b"")

    def close(self) -> None:
        self._connection.close()
        os.close(self._file)

    def dealt(self, one: Slice, rank: int) -> None:
        """A slice is about to be sent to a rank, perhaps again."""
        self._connection.execute(
            "INSERT INTO slices (id, first, units, rank) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (id) DO UPDATE SET rank = excluded.rank",
            (one.id, one.first, one.rows, rank),
        )

    def answered(self, one: Slice, rank: int, offset: int, values: Sequence[bytes]) -> None:
        """Keep a slice's values, the first of which is value `offset` of all."""
        os.pwrite(self._file, b"".join(values), offset * VALUE_BYTES)
        flush(self._file)
        self._connection.execute("UPDATE slices SET answered = ? WHERE id = ?", (rank, one.id))

    def slices(self) -> Iterator[tuple[Slice, bool]]:
        """Yield the slices dealt so far, in order, and whether each was answered."""
        query = "SELECT id, first, units, answered IS NOT NULL FROM slices ORDER BY id"
        for number, first, units, is_answered in self._connection.execute(query).fetchall():
            yield Slice(number, first, units), bool(is_answered)

    def read(self, offset: int, most: int) -> bytes:
        """At most so many values from `offset` on."""
        return os.pread(self._file, most * VALUE_BYTES, offset * VALUE_BYTES)

    def digest(self) -> str:
        """SHA-256 of the values; reads all of them."""
        with self._path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


class _StoredValues:
    """The reference's values in this node's caches."""

    def __init__(self, folder: Path, digest: str) -> None:
        self._folder, self._digest = folder, digest

    def take(self, session: Session, ask: ReferenceAsk) -> ReferenceSlice:
        if ask.digest == self._digest:
            return _answer(ask, digest=self._digest)
        with received_names.opened(self._folder, VALUES_NAME) as file:
            file.seek(ask.offset * VALUE_BYTES)
            part = file.read(PART_VALUES * VALUE_BYTES)
        return _answer(ask, offset=ask.offset, values=part, digest=self._digest)

    def close(self) -> None:
        return


class _CollectedValues:
    """The reference's values that ranks compute."""

    def __init__(self, journal: ReferenceJournal) -> None:
        self._journal, self.folder = journal, journal.folder
        self._pass = ReferencePass(*journal.sizes.numbers(), journal.slices())
        self._digest: asyncio.Task[str] | None = None  # once all values are there

    @property
    def is_done(self) -> bool:
        return self._pass.is_done

    def close(self) -> None:
        if self._digest is not None:
            self._digest.cancel()
        self._journal.close()

    def take(self, session: Session, ask: ReferenceAsk) -> ReferenceSlice:
        now, journal, one = time.monotonic(), self._journal, self._pass
        done = Slice(ask.slice, ask.first, ask.units) if ask.slice is not None else None
        if done is not None:
            if one.is_new(done):
                self._keep(done, ask)
            one.answer(ask.rank, done, now)
        for rank, at in session.conductor.ranks.items():
            if at.ended or (at.heard is not None and now - at.heard > SILENT_SECONDS):
                one.lose(rank)
        dealt = one.deal(ask.rank, now) if ask.wants else None
        if dealt is not None:
            journal.dealt(dealt, ask.rank)
        most = min(PART_VALUES, one.available - ask.offset)
        part = {"offset": ask.offset, "values": journal.read(ask.offset, most)} if most > 0 else {}
        given = {"slice": dealt.id, "first": dealt.first, "units": dealt.rows} if dealt is not None else {}
        return _answer(ask, answered=one.answered, digest=self._digest_of_all(), **part, **given)

    def _keep(self, done: Slice, ask: ReferenceAsk) -> None:
        offset, count = self._pass.span(done)
        size = sum(map(len, ask.values))
        if size != count * VALUE_BYTES:
            raise ValueError(
                f"rank {ask.rank} sent {size:,} bytes for {count:,} values; its trainctl version may differ"
            )
        self._journal.answered(done, ask.rank, offset, ask.values)

    def _digest_of_all(self) -> str:
        if not self._pass.is_done:
            return ""
        if self._digest is None:
            self._digest = asyncio.create_task(asyncio.to_thread(self._journal.digest))
        return self._digest.result() if self._digest.done() else ""


_Values = _StoredValues | _CollectedValues


class ReferenceLead:
    """Lead of the reference passes in the run that this agent leads."""

    def __init__(self, node: str) -> None:
        self._node, self._run = node, ""
        self._open: dict[str, _Values] = {}
        self._told: set[int] = set()  # ranks of which the conductor knows that they compute

    async def take(self, session: Session, ask: ReferenceAsk) -> None:
        """Answer a rank."""
        if session.run != self._run:
            self.close()
            self._run = session.run
        if ask.rank not in self._told and not ask.digest:
            self._told.add(ask.rank)
            await session.feed(Computing(ask.rank))
        try:
            found = self._find(session, ask)
            answer = found.take(session, ask) if found is not None else _answer(ask, known=False)
        except (OSError, sqlite3.Error, TrainctlError, ValueError) as error:
            answer = _answer(ask, problem=f"{self._node} can't keep the reference's log-probabilities: {error}"[:500])
        if ask.rank in session.ports:
            await session.ports[ask.rank].tell(answer)

    def ended(self) -> None:
        """The run has ended: its journals are of no more use. One that isn't whole is left for the next run with the
        same reference."""
        for found in self._open.values():
            if isinstance(found, _CollectedValues) and found.is_done:
                shutil.rmtree(found.folder, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Leave the journals for the next agent of this node."""
        for found in self._open.values():
            found.close()
        self._open.clear()
        self._told.clear()

    def _find(self, session: Session, ask: ReferenceAsk) -> _Values | None:
        """Return what has the values or collects them; None if the units' sizes are needed for that."""
        if ask.reference not in self._open:
            made = self._make(session, ask)
            if made is None:
                return None
            self._open[ask.reference] = made
        return self._open[ask.reference]

    def _make(self, session: Session, ask: ReferenceAsk) -> _Values | None:
        caches = run_file.cache_folder(session.conductor.config, self._node, session.paths.node_data)
        stored = received_names.below(caches, ask.reference)
        folder = received_names.unlinked(caches / f".{ask.reference}.{self._node}")
        if digest := stored_digest(stored):
            shutil.rmtree(folder, ignore_errors=True)  # of an agent that was killed
            return _StoredValues(stored, digest)
        if received_names.unlinked(folder / SLICES_NAME).is_file():
            return _CollectedValues(ReferenceJournal(folder))
        return _CollectedValues(ReferenceJournal(folder, UnitSizes(ask.counts, ask.tokens))) if ask.counts else None


def _answer(ask: ReferenceAsk, **fields: object) -> ReferenceSlice:
    return ReferenceSlice(run=ask.run, ask=ask.ask, reference=ask.reference, **fields)  # type: ignore[arg-type]
