"""A reference's log-probabilities, computed by all ranks that load: which rank computes which units, and the journal.

Slices are dealt as those of other separate work are. Values that follow the first one without a gap can be handed on
at once, so ranks fetch those of others while they compute. The pass is pure.

A slice is journaled before it is sent, and its values are on disk before it counts as answered. A lead that restarts
continues from the journal.
"""

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from trainctl.node_agent.work.dealer import Dealer, Slice
from trainctl.protocol.files.durable_files import flush, make_folder
from trainctl.protocol.record.paths import VALUES_NAME
from trainctl.protocol.record.schema import open_for_writing

VALUE_BYTES = 4
MOST_UNITS = 1024
"""Units of a slice at most."""


class UnitSizes(NamedTuple):
    """Sizes of each unit, as a rank sends them: little-endian uint32."""

    counts: bytes  # values
    tokens: bytes  # tokens to process

    def numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Raises ValueError if they are no two lists of the same length."""
        counts, tokens = (struct.unpack(f"<{len(raw) // 4}I", raw) for raw in self)
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


SLICES_NAME = "slices.db"
_SCHEMA = """
CREATE TABLE IF NOT EXISTS sizes (counts BLOB NOT NULL, tokens BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS slices (
  id INTEGER PRIMARY KEY, first INTEGER NOT NULL, units INTEGER NOT NULL, rank INTEGER NOT NULL, answered INTEGER
);
"""


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
            self._connection.execute("INSERT INTO sizes VALUES (?, ?)", sizes)
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
            (*one, rank),
        )

    def answered(self, one: Slice, rank: int, offset: int, values: Sequence[bytes]) -> None:
        """Keep a slice's values, the first of which is value `offset` of all."""
        os.pwrite(self._file, b"".join(values), offset * VALUE_BYTES)
        flush(self._file)
        self._connection.execute("UPDATE slices SET answered = ? WHERE id = ?", (rank, one.id))

    def slices(self) -> Iterator[tuple[Slice, bool]]:
        """Those dealt so far, in order, and whether each was answered."""
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
